"""What a plan is: the values, which tokens a piece holds, the order of operations, the proof, file and text.

    from bytescale.plan import plan_from_text, read_plan, write_plan

This package holds plans; `bytescale.planner.plan` makes them, `bytescale.validate.validate` proves them.
"""

from bytescale.plan.file import plan_from_dict, plan_to_dict, read_plan, write_plan
from bytescale.plan.step_plan import Layout, Pieces, Prediction, StepPlan, step_plan
from bytescale.plan.text import plan_from_text, plan_to_text

__all__ = [
    "Layout",
    "Pieces",
    "Prediction",
    "StepPlan",
    "plan_from_dict",
    "plan_from_text",
    "plan_to_dict",
    "plan_to_text",
    "read_plan",
    "step_plan",
    "write_plan",
]
