"""ByteScale: train language models on mixtures of short and very long sequences with Hybrid Data Parallelism.

Importing this package needs numpy alone. The rooms: `plan`, `layout`, `schedule`, `validate` (values), `cost`
(estimates), `planner` (decisions), `data` (text to tokens), `runtime` (distributed attention and model states),
`train` (the step loop), `cli` (the faces).
"""

from bytescale.errors import CommunicationError, UserError
from bytescale.plan import StepPlan, step_plan
from bytescale.validate import PlanError, validate

__version__ = "0.1.0"

__all__ = ["CommunicationError", "PlanError", "StepPlan", "UserError", "step_plan", "validate"]
