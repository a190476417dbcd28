"""Simulation of a step plan on a described cluster: its timeline, where the time goes, its memory. numpy alone.

    from bytescale.cost import cluster_spec, model_shape, preset_cost
    from bytescale.planner import plan
    from bytescale.simulator import shares, simulate, step_overheads

    cost = preset_cost("llama-7b", "h100")
    step_plan = plan([65536, 900, 120], "hdp-balance", hdp_size=16, tokens_per_rank=8192, cost=cost)
    step = simulate(step_plan, cost, step_overheads(model_shape("llama-7b"), cluster_spec("h100"), hdp_size=16))
    print(step.step_time_s, shares(step).communication)

Without overheads the step time is the plan's predicted one. Nothing here imports the planner.
"""

from bytescale.simulator.components import Components, components
from bytescale.simulator.engine import Operations, RankTimes, SimulatedStep, simulate
from bytescale.simulator.limits import ContextLimit, context_limits
from bytescale.simulator.memory import PeakMemory, peak_memory
from bytescale.simulator.outcome import Shares, main_loss, mean_shares, mfu, shares, step_figures, tokens_per_s
from bytescale.simulator.overheads import StepOverheads, collective_s, step_overheads
from bytescale.simulator.spans import step_spans
from bytescale.simulator.workload import stratified_batches

__all__ = [
    "Components",
    "ContextLimit",
    "Operations",
    "PeakMemory",
    "RankTimes",
    "Shares",
    "SimulatedStep",
    "StepOverheads",
    "collective_s",
    "components",
    "context_limits",
    "main_loss",
    "mean_shares",
    "mfu",
    "peak_memory",
    "shares",
    "simulate",
    "step_figures",
    "step_overheads",
    "step_spans",
    "stratified_batches",
    "tokens_per_s",
]
