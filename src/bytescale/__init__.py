"""ByteScale: train language models on mixtures of short and very long sequences with Hybrid Data Parallelism.

Importing this package needs numpy alone. The rooms: `plan` and `config` (values), `cost` and
`lengths` (estimates), `planner` (decisions), `simulator` and `reproduction` (predictions), `data` (text to tokens),
`runtime` (distributed attention and model states), `profiler`, `train` (the step loop), `cli` (the faces).

    from bytescale.planner import make_plan        # lengths to a plan
    from bytescale.plan import read_plan, write_plan
    from bytescale.validate import validate        # the proof
"""

from bytescale.errors import CommunicationError, UserError
from bytescale.plan.step_plan import StepPlan, step_plan
from bytescale.plan.validate import PlanError

__version__ = "0.1.0"

__all__ = ["CommunicationError", "PlanError", "StepPlan", "UserError", "step_plan"]
