"""One rank for short sequences of a small plan, where the model's gain from more of them is below its noise.

A search that minimises the predicted step cuts whatever helps by a thousandth, down to one token over all ranks, since
a sequence costs nothing more in a gang that exists anyway. Predictions are not that good, and serving short sequences
alone is what HDP is for. So the shortest cut sequences become whole again, each in one of the micro-batches that held
a part of it, as many of them as the step allows within `NOISE`.

Invariant: the plan stays legal, since parts only go and a whole one goes where it fits: no gang grows, no order
changes; the step is at most 1 + `NOISE` of the given one. Cost: at most log2(n) + 1 predictions.
"""

from dataclasses import replace

import numpy as np

from bytescale.arrays import IntArray
from bytescale.cost.predict import predict
from bytescale.plan.memory import resident_tokens
from bytescale.plan.step_plan import StepPlan, step_plan
from bytescale.planner.problem import Problem

NOISE = 1e-3
"""Relative difference of predicted steps that nobody could measure."""

SHORT_PIECE_TOKENS = 512
"""Only sequences with pieces shorter than this become whole: the others are worth their messages."""

MAX_SEQUENCES = 64
"""Batches larger than this are left as they are: a short sequence more or less does not show."""


def narrowed(problem: Problem, chosen: StepPlan) -> StepPlan:
    """`chosen`, or a plan in which its shortest sequences are whole. Both are predicted."""
    assert chosen.predicted is not None
    if chosen.layout != "zigzag" or chosen.pp_size > 1 or chosen.num_sequences > MAX_SEQUENCES:
        return chosen  # with a pipeline an emptied micro-batch would shift the others in 1F1B
    degree = chosen.sequence_degrees()
    cut = np.flatnonzero((degree > 1) & (chosen.lengths // degree < SHORT_PIECE_TOKENS))
    cut = cut[np.argsort(chosen.lengths[cut], kind="stable")]
    limit_s = chosen.predicted.step_time_s * (1 + NOISE)
    best, low, high = chosen, 0, len(cut)
    while low < high:
        count = (low + high + 1) // 2
        plan = _with_whole(chosen, cut[:count])
        if plan is not None:
            plan = replace(plan, predicted=predict(plan, problem.cost, rank_speed=problem.rank_speed))
        if plan is not None and plan.predicted is not None and plan.predicted.step_time_s <= limit_s:
            best, low = plan, count
        else:
            high = count - 1
    return best


def _with_whole(plan: StepPlan, sequences: IntArray) -> StepPlan | None:
    """`plan` with each of `sequences` whole in the emptiest of its own micro-batches; None where one does not fit."""
    pieces, ids = plan.pieces, plan.micro_batch_ids()
    held = np.bincount(ids, weights=resident_tokens(pieces.tokens, pieces.offload_ratio, plan.num_layers))
    kept, tokens = np.ones(len(pieces), dtype=bool), pieces.tokens.copy()
    for sequence in sequences.tolist():
        rows = np.flatnonzero(pieces.sequence == sequence)
        share = resident_tokens(tokens[rows], pieces.offload_ratio[rows], plan.num_layers)
        np.subtract.at(held, ids[rows], share)
        row = int(rows[held[ids[rows]].argmin()])
        tokens[row] = plan.lengths[sequence]
        kept[rows] = rows == row
        own = resident_tokens(tokens[[row]], pieces.offload_ratio[[row]], plan.num_layers)
        held[ids[row]] += float(own[0])
        if held[ids[row]] > plan.tokens_per_rank:
            return None
    assert pieces.cp_degree is not None and pieces.cp_index is not None
    whole = np.isin(pieces.sequence, sequences)[kept]
    return step_plan(
        strategy=plan.strategy,
        hdp_size=plan.hdp_size,
        pp_size=plan.pp_size,
        tokens_per_rank=plan.tokens_per_rank,
        num_layers=plan.num_layers,
        lengths=plan.lengths,
        sequence=pieces.sequence[kept],
        rank=pieces.rank[kept],
        micro_batch=_renumbered(pieces.rank[kept], pieces.micro_batch[kept]),
        tokens=tokens[kept],
        offload_ratio=pieces.offload_ratio[kept],
        cp_degree=np.where(whole, 1, pieces.cp_degree[kept]),
        cp_index=np.where(whole, 0, pieces.cp_index[kept]),
    )


def _renumbered(rank: IntArray, micro_batch: IntArray) -> IntArray:
    """Micro-batches of every rank without the gaps that emptied ones leave; rows are ordered by both."""
    new_rank = np.concatenate([[True], np.diff(rank) != 0])
    new = np.concatenate([[True], np.diff(micro_batch) != 0]) | new_rank
    number = np.cumsum(new) - 1
    without_gaps: IntArray = number - number[new_rank][np.cumsum(new_rank) - 1]
    return without_gaps
