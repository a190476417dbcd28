"""The engine: a step plan on a described cluster, operation by operation, and where every second of every rank goes.

A micro-batch on a stage is one operation a direction; its own time comes from `components`. Gangs start when all
members are ready and last as long as the slowest; pipelines run 1F1B over their own number of micro-batches; hidden
states travel between stages. The recurrence is `bytescale.cost.makespan`, over the graph of `bytescale.plan.order`:

    step = gather + makespan + reduce + update + exposed input.

The time of a rank and stage between two of its operations is a pipeline bubble until its own pipeline is ready, then
waiting for the gang. What a pipeline waits after its own last operation is the DP bubble.

Invariants: on every rank and stage compute + tensor + communication + copy + gang wait + PP bubble + DP bubble +
overheads is the step time; without overheads the step time is that of `bytescale.cost.predict`. Nothing is random.
Cost: O(pieces + micro-batches * pp_size), vectorised over ranks.
"""

from dataclasses import dataclass

import numpy as np

from bytescale.arrays import FloatArray, exclusive_sum
from bytescale.cost.makespan import earliest_starts, makespan
from bytescale.cost.micro_batch import Ulysses
from bytescale.cost.model import CostModel
from bytescale.plan.order import BACKWARD, FORWARD, Gangs, gangs_of, operation_edges, stage_orders
from bytescale.plan.step_plan import StepPlan
from bytescale.simulator.components import Components, components
from bytescale.simulator.overheads import StepOverheads


@dataclass(frozen=True)
class RankTimes:
    """Seconds of each rank and stage. All of shape [hdp_size, pp_size]; with the step's overheads they add to the step.

    Attributes:
        compute_s: kernels run.
        tensor_s: collectives of tensor parallelism.
        communication_s: attention communication that nothing hides.
        copy_s: offload copies that nothing hides.
        gang_wait_s: waiting for other members of a gang, before and inside it.
        pp_bubble_s: waiting for other stages of the own pipeline.
        dp_bubble_s: waiting for other pipelines at the end of the step.
        transfer_s, d2h_s, h2d_s: how long the P2P link and the copy engines are busy, hidden or not.
    """

    compute_s: FloatArray
    tensor_s: FloatArray
    communication_s: FloatArray
    copy_s: FloatArray
    gang_wait_s: FloatArray
    pp_bubble_s: FloatArray
    dp_bubble_s: FloatArray
    transfer_s: FloatArray
    d2h_s: FloatArray
    h2d_s: FloatArray

    @property
    def busy_s(self) -> FloatArray:
        """Compute and what it could not hide: the rank's own work."""
        return self.compute_s + self.tensor_s + self.communication_s + self.copy_s


@dataclass(frozen=True)
class Operations:
    """When each micro-batch runs on each stage. All of shape [2, M, pp_size]; index 0 forward, 1 backward.

    Attributes:
        start_s: since the first micro-batch could start; all members of a gang agree.
        end_s: of the gang.
        own_s: time of this member; the rest up to `end_s` it waits.
    """

    start_s: FloatArray
    end_s: FloatArray
    own_s: FloatArray


@dataclass(frozen=True)
class SimulatedStep:
    """A step as simulated.

    Attributes:
        plan: what ran.
        step_time_s: everything.
        makespan_s: of the micro-batches alone.
        overheads: the rest, as asked.
        exposed_input_s: loading and planning not hidden.
        ranks: where the time of each rank and stage went.
        operations: the timeline.
        parts: times of each micro-batch.
    """

    plan: StepPlan
    step_time_s: float
    makespan_s: float
    overheads: StepOverheads
    exposed_input_s: float
    ranks: RankTimes
    operations: Operations
    parts: Components


def simulate(
    plan: StepPlan,
    cost: CostModel,
    overheads: StepOverheads | None = None,
    *,
    rank_speed: FloatArray | None = None,
    ulysses: Ulysses | None = None,
) -> SimulatedStep:
    """Run `plan`.

    Args:
        plan: an executable plan (see `bytescale.plan.validate`).
        cost: what pieces cost.
        overheads: what the step costs besides its micro-batches; None is nothing.
        rank_speed: relative speed of each rank; None takes all as equal.
        ulysses: attention by head exchange instead of a ring.

    Raises:
        ValueError: the operations of the plan wait for each other in a cycle.
    """
    extra = StepOverheads() if overheads is None else overheads
    parts = components(plan, cost, rank_speed=rank_speed, ulysses=ulysses)
    operations, gangs, stage_delay_s = _run(plan, parts.total_s, extra)
    makespan_s = float(operations.end_s.max(initial=0.0))
    ranks = _attribute(plan, parts, operations, gangs, stage_delay_s, makespan_s)
    inner_s = extra.gather_s + makespan_s + extra.reduce_s + extra.update_s
    input_s = extra.exposed_input_s(inner_s)
    return SimulatedStep(plan, inner_s + input_s, makespan_s, extra, input_s, ranks, operations, parts)


def _run(plan: StepPlan, own_s: FloatArray, extra: StepOverheads) -> tuple[Operations, Gangs, FloatArray]:
    """The operations, the gangs and how long hidden states of each gang travel between stages."""
    pp = plan.pp_size
    if pp == 1 or extra.stage_link is None:
        line = makespan(plan, own_s[FORWARD], own_s[BACKWARD])
        gangs, start, end = line.gangs, line.start_s, line.end_s
        delay_s = np.zeros(gangs.num_gangs)
    else:
        gangs = gangs_of(plan)
        delay_s = _stage_delay_s(plan, gangs, extra)
        start, end = _with_stage_transfers(plan, gangs, own_s, delay_s)
    if pp > 1:
        shape = (gangs.num_gangs, pp, 2)
        starts, ends = (np.moveaxis(t.reshape(shape)[gangs.gang], 2, 0) for t in (start, end))
        return Operations(starts, ends, own_s), gangs, delay_s
    forward_s = np.zeros(gangs.num_gangs)
    np.maximum.at(forward_s, gangs.gang, own_s[FORWARD, :, 0])
    turn = start + forward_s
    starts, ends = (t[:, gangs.gang, None] for t in (np.stack([start, turn]), np.stack([turn, end])))
    return Operations(starts, ends, own_s), gangs, delay_s


def _stage_delay_s(plan: StepPlan, gangs: Gangs, extra: StepOverheads) -> FloatArray:
    """Time that the hidden states of each gang take to the next stage: that of its largest member."""
    assert extra.stage_link is not None
    tokens = np.bincount(plan.micro_batch_ids(), weights=plan.pieces.tokens, minlength=len(gangs.gang))
    most = np.zeros(gangs.num_gangs)
    np.maximum.at(most, gangs.gang, tokens)
    return np.asarray(extra.stage_link.time_s(most * extra.stage_bytes_per_token), np.float64)


def _with_stage_transfers(
    plan: StepPlan, gangs: Gangs, own_s: FloatArray, delay_s: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """`makespan` with one more node for every transfer between stages."""
    pp = plan.pp_size
    slowest = np.zeros((gangs.num_gangs, pp, 2))
    for direction in (FORWARD, BACKWARD):
        np.maximum.at(slowest[:, :, direction], gangs.gang, own_s[direction])
    num, source, target = operation_edges(plan, gangs)
    crossing = (source // (2 * pp) == target // (2 * pp)) & (source // 2 % pp != target // 2 % pp)
    way = num + np.arange(int(crossing.sum()))
    sources = np.concatenate([source[~crossing], source[crossing], way])
    targets = np.concatenate([target[~crossing], way, target[crossing]])
    duration = np.concatenate([slowest.ravel(), delay_s[source[crossing] // (2 * pp)]])
    start = earliest_starts(num + len(way), sources, targets, duration)
    return start[:num], (start + duration)[:num]


def _attribute(
    plan: StepPlan,
    parts: Components,
    operations: Operations,
    gangs: Gangs,
    stage_delay_s: FloatArray,
    makespan_s: float,
) -> RankTimes:
    """Add up the seconds of each rank and stage."""
    shape = (plan.hdp_size, plan.pp_size)

    def per_rank(values: FloatArray) -> FloatArray:
        table = np.zeros(shape)
        np.add.at(table, gangs.rank, values)
        return table

    ready = _ready_s(operations, stage_delay_s[gangs.gang])
    inside_s = (operations.end_s - operations.start_s - operations.own_s).sum(axis=0)
    bubble_s, wait_s = np.zeros(shape), per_rank(inside_s)
    last_end_s = np.zeros(shape)
    counts = plan.num_micro_batches()
    first = exclusive_sum(counts)
    for rows, stage, order in stage_orders(plan):
        micro_batch = first[rows][:, None] + order[:, 0]
        at = (order[:, 1][None, :], micro_batch, stage)
        start, end, ready_own = operations.start_s[at], operations.end_s[at], ready[at]
        before = np.concatenate([np.zeros((len(rows), 1)), end[:, :-1]], axis=1)
        own_ready = np.clip(ready_own, before, start)
        bubble_s[rows, stage] += (own_ready - before).sum(axis=1)
        wait_s[rows, stage] += (start - own_ready).sum(axis=1)
        last_end_s[rows, stage] = end[:, -1]
    pipeline_end_s = last_end_s.max(axis=1, keepdims=True)
    return RankTimes(
        compute_s=per_rank(parts.compute_s.sum(axis=0)),
        tensor_s=per_rank(parts.tensor_s.sum(axis=0)),
        communication_s=per_rank(parts.communication_s.sum(axis=0)),
        copy_s=per_rank(parts.copy_s.sum(axis=0)),
        gang_wait_s=np.maximum(wait_s, 0.0),
        pp_bubble_s=bubble_s + pipeline_end_s - last_end_s,
        dp_bubble_s=np.broadcast_to(makespan_s - pipeline_end_s, shape).copy(),
        transfer_s=per_rank(parts.transfer_s.sum(axis=0)),
        d2h_s=per_rank(parts.copying_s[FORWARD]),
        h2d_s=per_rank(parts.copying_s[BACKWARD]),
    )


def _ready_s(operations: Operations, delay_s: FloatArray) -> FloatArray:
    """When the own pipeline has everything an operation needs from its other stages. Shape [2, M, pp_size]."""
    ready = np.zeros_like(operations.start_s)
    end, delay = operations.end_s, delay_s[:, None]
    ready[FORWARD, :, 1:] = end[FORWARD, :, :-1] + delay
    ready[BACKWARD, :, :-1] = end[BACKWARD, :, 1:] + delay
    ready[BACKWARD, :, -1] = end[FORWARD, :, -1]
    return ready
