"""What a strategy is: a name, a line of description, and a pure function from a `Problem` to a `StepPlan`.

The plan that the function returns carries the name of the strategy that made it, which for a search over other
strategies may be another one's. Equal input and seed give an equal plan.
"""

from collections.abc import Callable
from dataclasses import dataclass

from bytescale.plan.step_plan import StepPlan
from bytescale.planner.problem import Problem


@dataclass(frozen=True)
class Strategy:
    """One way to place a batch.

    Attributes:
        name: as the user writes it; the module of the strategy has the same name.
        summary: one line: what it does and whose it is.
        plan: makes the plan. Raises `UserError` where it cannot place the batch.
        pipeline_only: whether it is another strategy without a pipeline.
        makes_blocks: whether its plans have the layout `blocks`, which `train` cannot run.
        bound_s: a time that its plan takes at least without a pipeline, found for much less than the plan; raises as
            `plan` does. None where there is no such bound.
    """

    name: str
    summary: str
    plan: Callable[[Problem], StepPlan]
    pipeline_only: bool = False
    makes_blocks: bool = False
    bound_s: Callable[[Problem], float] | None = None
