"""What a plan is: the values, which tokens a piece holds, the order of operations, the proof, the file."""

from bytescale.plan.step_plan import Layout, Pieces, Prediction, StepPlan, step_plan

__all__ = ["Layout", "Pieces", "Prediction", "StepPlan", "step_plan"]
