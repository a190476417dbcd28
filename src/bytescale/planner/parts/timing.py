"""The predicted plan of several, without predicting all of them in full. Cost: a makespan a plan."""

from collections.abc import Iterable
from dataclasses import replace

from bytescale.cost.predict import predict
from bytescale.plan.step_plan import StepPlan
from bytescale.planner.problem import Problem


def predicted(problem: Problem, plan: StepPlan) -> StepPlan:
    """`plan` with its prediction."""
    return replace(plan, predicted=predict(plan, problem.cost, rank_speed=problem.rank_speed))


def step_s(plan: StepPlan) -> float:
    """Step time of a predicted plan."""
    assert plan.predicted is not None
    return plan.predicted.step_time_s


def shortest_plan(problem: Problem, plans: Iterable[StepPlan]) -> StepPlan:
    """The plan with the shortest step, predicted; of equal ones the first."""
    return min((predicted(problem, plan) for plan in plans), key=step_s)
