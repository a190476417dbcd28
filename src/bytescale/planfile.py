"""Plan files under their first name; they live in `bytescale.plan.file`."""

from bytescale.plan.file import plan_from_dict, plan_to_dict, read_plan, write_plan

__all__ = ["plan_from_dict", "plan_to_dict", "read_plan", "write_plan"]
