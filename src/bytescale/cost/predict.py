"""What a plan will take: own time of every micro-batch, the step, and the bound no plan can beat.

    bound = max( sum over sequences of T(s, 1) / hdp_size,   max over sequences of min over D of T(s, D) )

without the constant g, which depends on the packing. T grows with s at every degree, so the second term needs the
longest sequence alone. With a pipeline the first term counts one stage (the fullest), the second all of them. With
measured rank speeds work is divided by their sum. `rank_time_s` is the sum over a rank's micro-batches, the
rings of one advancing together (`bytescale.cost.micro_batch`), plus g each; gang waiting is added by `makespan`.

Cost: O(pieces + hdp_size), numpy.
"""

from dataclasses import dataclass

import numpy as np

from bytescale.arrays import FloatArray, IntArray, ceil_div
from bytescale.cost.blocks import block_times_s
from bytescale.cost.makespan import makespan
from bytescale.cost.micro_batch import ring_times
from bytescale.cost.model import CostModel, constant_s, piece_times_s
from bytescale.plan.step_plan import Prediction, StepPlan


@dataclass(frozen=True)
class Durations:
    """Own time of each micro-batch on each stage, waiting excluded. Both of shape [M, pp_size]."""

    forward_s: FloatArray
    backward_s: FloatArray


def stage_layers(cost: CostModel, pp_size: int) -> IntArray:
    """Layers of each stage such that the most expensive stage is as cheap as possible. Shape [pp_size].

    The embedding counts on the first stage and the head on the last, in layers at the length where attention costs
    what the rest of a layer does. Layers are dealt one by one to the cheapest stage, which is optimal for equal layers;
    every stage has at least one. One function for planner, simulator and runtime.
    """
    layer_s = 2 * (cost.forward.token_s + cost.backward.token_s)
    load = np.ones(pp_size)
    if layer_s > 0:
        load[0] += (cost.forward.embedding_token_s + cost.backward.embedding_token_s) / layer_s
        load[-1] += (cost.forward.head_token_s + cost.backward.head_token_s) / layer_s
    layers = np.ones(pp_size, dtype=np.int64)
    for _ in range(cost.num_layers - pp_size):
        cheapest = int(load.argmin())
        layers[cheapest] += 1
        load[cheapest] += 1
    return layers


def durations(plan: StepPlan, cost: CostModel, rank_speed: FloatArray | None = None) -> Durations:
    """Own time of every micro-batch of `plan` (ids as in `StepPlan.micro_batch_ids`)."""
    if plan.layout == "blocks":
        ids, num = plan.micro_batch_ids(), int(plan.num_micro_batches().sum())
        forward_s, backward_s = (
            np.bincount(ids, weights=times, minlength=num).astype(np.float64) for times in block_times_s(plan, cost)
        )
    else:
        forward_s, backward_s = (times.total_s for times in ring_times(plan, cost))
    return stage_durations(plan, cost, forward_s, backward_s, rank_speed)


def stage_durations(
    plan: StepPlan,
    cost: CostModel,
    forward_s: FloatArray,
    backward_s: FloatArray,
    rank_speed: FloatArray | None = None,
) -> Durations:
    """From one layer of every micro-batch (shape [M]) to its stages: times the layers, the constant g, both ends."""
    num = len(forward_s)
    layers = stage_layers(cost, plan.pp_size).astype(np.float64)
    tokens = np.bincount(plan.micro_batch_ids(), weights=plan.pieces.tokens, minlength=num)
    columns = []
    for times, constant, direction in zip(
        (forward_s, backward_s), constant_s(cost), (cost.forward, cost.backward), strict=True
    ):
        table = (times + constant)[:, None] * layers[None, :]
        table[:, 0] += direction.embedding_token_s * tokens
        table[:, -1] += direction.head_token_s * tokens
        columns.append(table)
    if rank_speed is not None and num:
        speed = np.repeat(rank_speed, plan.num_micro_batches())[:, None]
        columns = [table / speed for table in columns]
    return Durations(*columns)


def degree_one_work_s(cost: CostModel, lengths: IntArray, num_layers: float | None = None) -> FloatArray:
    """T(s, 1) of each sequence over `num_layers` layers (default: all, with the head), without g."""
    forward_s, backward_s = piece_times_s(cost, lengths)
    if num_layers is not None:
        return (forward_s + backward_s) * num_layers
    head_s = (cost.forward.ends_token_s + cost.backward.ends_token_s) * lengths
    return (forward_s + backward_s) * cost.num_layers + head_s


def least_time_s(cost: CostModel, length: int, hdp_size: int) -> tuple[float, int]:
    """Least time of one sequence over all degrees 1..hdp_size and the least degree that reaches it, without g."""
    degree = np.arange(1, hdp_size + 1)
    forward_s, backward_s = piece_times_s(cost, length, degree)
    head_s = (cost.forward.ends_token_s + cost.backward.ends_token_s) * (length / degree)
    total = (forward_s + backward_s) * cost.num_layers + head_s
    best = int(total.argmin())
    return float(total[best]), best + 1


def lower_bound_s(
    cost: CostModel, lengths: IntArray, hdp_size: int, pp_size: int = 1, rank_speed: FloatArray | None = None
) -> float:
    """No plan that runs these sequences whole on these ranks is faster.

    A sequence in chunks is in several stages of a pipeline at once and may end below its time in all of them.
    """
    if not len(lengths):
        return 0.0
    total_speed, top_speed = float(hdp_size), 1.0
    if rank_speed is not None:
        total_speed, top_speed = float(rank_speed.sum()), float(rank_speed.max())
    work = degree_one_work_s(cost, lengths, None if pp_size == 1 else ceil_div(cost.num_layers, pp_size))
    longest, _ = least_time_s(cost, int(lengths.max()), hdp_size)
    return max(float(work.sum()) / total_speed, longest / top_speed)


def rank_times_s(plan: StepPlan, times: Durations) -> FloatArray:
    """Sum over a rank's micro-batches, waiting excluded, on its busiest stage; no step is shorter than the largest."""
    owner = np.repeat(np.arange(plan.hdp_size), plan.num_micro_batches())
    stages = (times.forward_s + times.backward_s).T
    busy = [np.bincount(owner, weights=stage, minlength=plan.hdp_size) for stage in stages]
    return np.asarray(np.max(busy, axis=0), np.float64)


def predict(
    plan: StepPlan, cost: CostModel, *, rank_speed: FloatArray | None = None, planning_time_s: float = 0.0
) -> Prediction:
    """Step time with gang waiting, rank times without, and the lower bound.

    With a pipeline a rank's time is that of its busiest stage.
    """
    times = durations(plan, cost, rank_speed)
    schedule = makespan(plan, times.forward_s, times.backward_s)
    rank_time = rank_times_s(plan, times)
    mean = float(rank_time.mean())
    return Prediction(
        step_time_s=schedule.step_time_s,
        lower_bound_s=lower_bound_s(cost, plan.lengths, plan.hdp_size, plan.pp_size, rank_speed),
        rank_time_s=rank_time,
        imbalance=float(rank_time.max()) / mean if mean > 0 else 1.0,
        planning_time_s=planning_time_s,
    )
