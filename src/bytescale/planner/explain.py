"""Why a plan is as it is: the degrees of its longest sequences, and what bounds the step.

Everything is computed from the plan and the cost model alone, so plans read from a file can be explained as well. For a
sequence of s tokens the fewest ranks without offloading are ceil(s / C); a smaller degree was bought by offloading, a
larger one by widening, and the times at both are given. Cost: O(pieces + shown sequences).
"""

from dataclasses import dataclass, replace

import numpy as np

from bytescale.arrays import FloatArray, ceil_div
from bytescale.cost.model import CostModel, piece_times_s, rank_time_s
from bytescale.cost.predict import degree_one_work_s, durations, least_time_s
from bytescale.errors import counted
from bytescale.plan.order import gangs_of
from bytescale.plan.step_plan import StepPlan


@dataclass(frozen=True)
class SequenceReason:
    """One sequence and its degree.

    Attributes:
        sequence, length, degree, offload_ratio: as in the plan.
        memory_degree: ceil(s / C), the fewest ranks without offloading.
        time_s: on each of its ranks; memory_time_s: what it would be at `memory_degree` without offloading.
        fastest_degree: degree of least time over all ranks of the plan.
        moved_bytes: activations copied out and in again, all ranks, layers and both ways.
        exposed_s: part of `time_s` in which copies did not hide.
        reason: one sentence.
    """

    sequence: int
    length: int
    degree: int
    offload_ratio: float
    memory_degree: int
    time_s: float
    memory_time_s: float
    fastest_degree: int
    moved_bytes: float
    exposed_s: float
    reason: str


@dataclass(frozen=True)
class StepReason:
    """What bounds the step.

    Attributes:
        busiest_rank: rank with the most work, and its time.
        waiting_s: step time beyond that, which gangs (or pipeline bubbles) cost.
        bound_by: `work` or `longest sequence`, whichever gives the lower bound.
        longest: the longest sequence and its length.
        first_sequences: sequences of the busiest rank with the most time there.
    """

    busiest_rank: int
    busiest_s: float
    waiting_s: float
    bound_by: str
    longest: int
    longest_length: int
    first_sequences: tuple[int, ...]


def explain_sequences(plan: StepPlan, cost: CostModel, num: int = 8) -> list[SequenceReason]:
    """The `num` longest sequences of a plan, longest first; nothing for a block plan."""
    if plan.layout == "blocks" or not plan.num_sequences:
        return []
    degrees, chunks = plan.sequence_degrees(), plan.sequence_chunks()
    ratios = np.zeros(plan.num_sequences)
    ratios[plan.pieces.sequence] = plan.pieces.offload_ratio
    longest = np.argsort(-plan.lengths, kind="stable")[:num]
    return [
        _reason(plan, cost, int(i), int(degrees[i]), float(ratios[i]))
        if chunks[i] == 1
        else _chunked_reason(plan, cost, int(i), int(degrees[i]), float(ratios[i]))
        for i in longest
    ]


def _reason(plan: StepPlan, cost: CostModel, sequence: int, degree: int, ratio: float) -> SequenceReason:
    length, capacity = int(plan.lengths[sequence]), plan.tokens_per_rank
    memory_degree = ceil_div(length, capacity)
    layers = plan.num_layers
    time_s = float(rank_time_s(cost, length, degree, ratio, layers))
    hidden_s = float(rank_time_s(cost, length, degree, 0.0, layers))
    memory_time_s = float(rank_time_s(cost, length, memory_degree, 0.0, layers))
    _, fastest = least_time_s(cost, length, plan.hdp_size)
    per_layer = cost.activation_bytes_per_token * length + cost.activation_bytes * degree
    moved = 2 * ratio * per_layer * max(0, layers - 2) * plan.pp_size
    words = _sentence(plan, length, degree, ratio, memory_degree, time_s, memory_time_s, time_s - hidden_s)
    return SequenceReason(
        sequence, length, degree, ratio, memory_degree, time_s, memory_time_s, fastest, moved, time_s - hidden_s, words
    )


def _chunked_reason(plan: StepPlan, cost: CostModel, sequence: int, degree: int, ratio: float) -> SequenceReason:
    """A sequence in chunks: what its stages wait for, compared with the same ranks running it whole."""
    pieces = plan.pieces
    assert pieces.cp_index is not None and pieces.token_begin is not None and pieces.token_end is not None
    rows = np.flatnonzero((pieces.sequence == sequence) & (pieces.cp_index == 0))
    begin, end = pieces.token_begin[rows], pieces.token_end[rows]
    forward_s, backward_s = piece_times_s(cost, end - begin, degree, ratio, before=begin)
    each_s = (forward_s + backward_s) * plan.num_layers
    reason = _reason(plan, cost, sequence, degree, ratio)
    words = (
        f"{len(rows)} chunks on {degree} ranks: each waits {(plan.pp_size - 1) * each_s.max():.3g} s for its other "
        f"stages; whole, {reason.memory_degree} would wait {(plan.pp_size - 1) * reason.memory_time_s:.3g} s"
    )
    return replace(reason, time_s=float(each_s.sum()), reason=words)


def _sentence(
    plan: StepPlan,
    length: int,
    degree: int,
    ratio: float,
    memory_degree: int,
    time_s: float,
    memory_time_s: float,
    exposed_s: float,
) -> str:
    if ratio > 0 and degree < memory_degree:
        cost_words = "copies hidden" if exposed_s <= 1e-9 else f"{exposed_s:.3g} s of copies exposed"
        return f"offloading {ratio:.0%} saves {memory_degree - degree} of {memory_degree} ranks, {cost_words}"
    if degree > memory_degree:
        if time_s >= memory_time_s:
            hold = "1 holds" if memory_degree == 1 else f"{memory_degree} hold"
            return f"cut over {counted(degree, 'rank')} although {hold} it"
        bound = "" if plan.predicted is None else f" ({memory_time_s / plan.predicted.lower_bound_s:.0%} of the bound)"
        ranks = counted(memory_degree, "rank")
        return f"widened from {ranks}, where it takes {memory_time_s:.3g} s{bound}, to {time_s:.3g} s"
    if degree == 1:
        return "fits one rank"
    fewer = "1 does" if degree == 2 else f"{degree - 1} do"
    return f"memory: {degree} ranks of {counted(plan.tokens_per_rank, 'token')} hold {length}, {fewer} not"


def explain_step(plan: StepPlan, cost: CostModel) -> StepReason:
    """Which rank, which waiting and which bound decide the step."""
    assert plan.predicted is not None
    predicted = plan.predicted
    busiest = int(predicted.rank_time_s.argmax())
    busiest_s = float(predicted.rank_time_s[busiest])
    longest = int(plan.lengths.argmax())
    layers = None if plan.pp_size == 1 else plan.num_layers
    work_s = float(degree_one_work_s(cost, plan.lengths, layers).sum()) / plan.hdp_size
    longest_s, _ = least_time_s(cost, int(plan.lengths[longest]), plan.hdp_size)
    return StepReason(
        busiest_rank=busiest,
        busiest_s=busiest_s,
        waiting_s=max(0.0, predicted.step_time_s - busiest_s),
        bound_by="longest sequence" if longest_s > work_s else "work",
        longest=longest,
        longest_length=int(plan.lengths[longest]),
        first_sequences=_heaviest_on(plan, cost, busiest),
    )


def _heaviest_on(plan: StepPlan, cost: CostModel, rank: int, num: int = 3) -> tuple[int, ...]:
    rows = np.flatnonzero(plan.pieces.rank == rank)
    pieces = plan.pieces
    sequences, first, which = np.unique(pieces.sequence[rows], return_index=True, return_inverse=True)
    if pieces.cp_degree is None:
        weight: FloatArray = np.bincount(which, weights=pieces.tokens[rows]).astype(np.float64)
    else:
        times = piece_times_s(cost, plan.lengths[sequences], pieces.cp_degree[rows[first]])
        weight = times[0] + times[1]
    return tuple(sequences[np.argsort(-weight, kind="stable")[:num]].tolist())


def gang_waiting_s(plan: StepPlan, cost: CostModel) -> float:
    """Rank-seconds that members of gangs wait inside them for their slowest member, all gangs together."""
    gangs = gangs_of(plan)
    times = durations(plan, cost)
    own = (times.forward_s + times.backward_s).sum(axis=1)
    slowest = np.zeros(gangs.num_gangs)
    np.maximum.at(slowest, gangs.gang, own)
    return float((slowest[gangs.gang] - own).sum())
