"""Proof that a plan can be executed and computes every token exactly once, before anything runs.

`validate` checks, and names sequence and rank when it cannot confirm:

1. coverage: every token of every sequence exactly once; in the zig-zag layout one cp_degree D per sequence, D distinct
   ranks, cp_index 0..D-1 once each; micro-batches numbered without gaps; the chunks of a sequence are neighbouring
   micro-batches of the same ranks in the order of their tokens;
2. memory: for every micro-batch, sum over its pieces of tokens * (k + (1 - r)(l - k)) / l <= C, with l layers on the
   rank, r the offload ratio and k = min(2, l) layers that always stay (r = 0 gives tokens <= C);
   in the `chunks` layout also: every rank and stage holds at most pp_size * C tokens between forward and backward,
   which is what 1F1B of whole sequences may need at its first stage, key-and-value gradients of kept chunks counted;
3. executable: a gang has at most one micro-batch per rank, and the operation graph has no cycle (`plan.order`);
4. an idle rank is legal; `PlanReport` lists it.

Cost: O(n log n) in pieces, numpy only.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bytescale.arrays import IntArray
from bytescale.errors import UserError
from bytescale.plan.graph import find_cycle
from bytescale.plan.memory import in_flight_tokens, resident_tokens
from bytescale.plan.order import BACKWARD, gangs_of, operation_edges
from bytescale.plan.step_plan import StepPlan
from bytescale.plan.zigzag import piece_tokens

MAX_RANKS = 2**22
MAX_STAGES = 2**12


class PlanError(UserError):
    """A plan breaks a rule; the message names the rule, the sequence and the rank."""


@dataclass(frozen=True)
class PlanReport:
    """What a valid plan looks like.

    Attributes:
        num_micro_batches: per rank. Shape [hdp_size].
        idle_ranks: ranks without a piece.
        num_gangs: gangs of more than one micro-batch.
        peak_tokens: largest token-equivalents that any micro-batch holds (rule 2), at most tokens_per_rank.
    """

    num_micro_batches: IntArray
    idle_ranks: IntArray
    num_gangs: int
    peak_tokens: float


def validate(plan: StepPlan) -> PlanReport:
    """Check every rule.

    Raises:
        PlanError: the first rule found broken, with sequence and rank.
    """
    _check_ranges(plan)
    if plan.layout == "blocks":
        _check_block_coverage(plan)
    else:
        _check_zigzag_coverage(plan)
    _check_micro_batch_numbers(plan)
    peak_tokens = _check_memory(plan)
    num_gangs = _check_order(plan)
    counts = plan.num_micro_batches()
    return PlanReport(
        num_micro_batches=counts, idle_ranks=np.flatnonzero(counts == 0), num_gangs=num_gangs, peak_tokens=peak_tokens
    )


def _first(mask: npt.NDArray[np.bool_]) -> int | None:
    found = np.flatnonzero(mask)
    return int(found[0]) if len(found) else None


def _check_ranges(plan: StepPlan) -> None:
    for name in ("hdp_size", "pp_size", "tokens_per_rank", "num_layers"):
        if getattr(plan, name) < 1:
            raise PlanError(f"{name} is {getattr(plan, name)}; it must be at least 1")
    for name, most in (("hdp_size", MAX_RANKS), ("pp_size", MAX_STAGES)):
        if getattr(plan, name) > most:
            raise PlanError(f"{name} is {getattr(plan, name)}; plans go up to {most}")
    if (i := _first(plan.lengths < 1)) is not None:
        raise PlanError(f"sequence {i} has length {plan.lengths[i]}; every length must be at least 1")
    pieces = plan.pieces
    if (i := _first((pieces.sequence < 0) | (pieces.sequence >= plan.num_sequences))) is not None:
        raise PlanError(f"a piece names sequence {pieces.sequence[i]}; sequences are 0..{plan.num_sequences - 1}")
    if (i := _first((pieces.rank < 0) | (pieces.rank >= plan.hdp_size))) is not None:
        raise PlanError(
            f"sequence {pieces.sequence[i]} has a piece on rank {pieces.rank[i]}; ranks are 0..{plan.hdp_size - 1}"
        )
    if (i := _first(pieces.micro_batch < 0)) is not None:
        raise PlanError(
            f"sequence {pieces.sequence[i]} on rank {pieces.rank[i]} is in micro-batch {pieces.micro_batch[i]}; "
            "micro-batches count from 0"
        )
    if (i := _first(~((pieces.offload_ratio >= 0) & (pieces.offload_ratio <= 1)))) is not None:
        raise PlanError(
            f"sequence {pieces.sequence[i]} on rank {pieces.rank[i]} has offload_ratio {pieces.offload_ratio[i]}; "
            "it must lie in [0, 1]"
        )


def _check_zigzag_coverage(plan: StepPlan) -> None:
    """One degree, distinct ranks and every cp_index once in each sequence or, in the `chunks` layout, each chunk."""
    pieces = plan.pieces
    degree, index = pieces.cp_degree, pieces.cp_index
    assert degree is not None and index is not None
    rows, begin = plan.sequence_rows()
    if (i := _first(np.diff(begin) == 0)) is not None:
        raise PlanError(f"sequence {i} ({plan.lengths[i]} tokens) is not placed on any rank")
    length = plan.lengths[pieces.sequence]
    if plan.layout == "chunks" and len(rows):
        begin, length = _check_chunks(plan, rows)
    counts = np.diff(begin)
    expected = np.repeat(counts, counts)
    if (i := _first(degree[rows] != expected)) is not None:
        row = rows[i]
        raise PlanError(
            f"sequence {pieces.sequence[row]} says cp_degree {degree[row]} on rank {pieces.rank[row]} "
            f"but has {expected[i]} pieces"
        )
    position = np.arange(len(rows)) - np.repeat(begin[:-1], counts)
    if (i := _first(index[rows] != position)) is not None:
        row = rows[i]
        raise PlanError(
            f"sequence {pieces.sequence[row]} must have cp_index 0..{degree[row] - 1} once each; "
            f"rank {pieces.rank[row]} has {index[row]}"
        )
    group = np.zeros(len(rows), dtype=np.int64)
    group[rows] = np.repeat(np.arange(len(counts)), counts)
    by_rank = np.lexsort((pieces.rank, group))
    repeated = (np.diff(group[by_rank]) == 0) & (np.diff(pieces.rank[by_rank]) == 0)
    if (i := _first(repeated)) is not None:
        row = by_rank[i]
        raise PlanError(f"sequence {pieces.sequence[row]} has two pieces on rank {pieces.rank[row]}")
    tokens = piece_tokens(length, degree, index)
    if (i := _first(tokens != pieces.tokens)) is not None:
        raise PlanError(
            f"sequence {pieces.sequence[i]} on rank {pieces.rank[i]} says {pieces.tokens[i]} tokens; "
            f"piece {index[i]} of {degree[i]} of {length[i]} tokens has {tokens[i]}"
        )
    if plan.layout == "chunks" and len(rows):
        _check_chunk_order(plan)


def _check_chunks(plan: StepPlan, rows: IntArray) -> tuple[IntArray, IntArray]:
    """Chunks cover their sequence in order, on the same ranks, in neighbouring micro-batches.

    Returns:
        Where each chunk begins in `rows`, with the end; and the tokens of the chunk of every piece.
    """
    pieces = plan.pieces
    token_begin, token_end = pieces.token_begin, pieces.token_end
    assert token_begin is not None and token_end is not None
    if plan.pp_size == 1:
        raise PlanError("a plan in the chunks layout needs a pipeline; pp_size is 1")
    if not 0 <= plan.kept_gradient_share < float("inf"):
        raise PlanError(f"kept_gradient_share is {plan.kept_gradient_share}; it must be at least 0")
    sequence, chunk_begin, chunk_end = pieces.sequence[rows], token_begin[rows], token_end[rows]
    same = np.diff(sequence) == 0
    new = np.concatenate([[True], ~same | (np.diff(chunk_begin) != 0)])
    first = np.flatnonzero(new)
    if (i := _first(pieces.tokens[rows] < 1)) is not None and np.bincount(sequence[first])[sequence[i]] > 1:
        raise PlanError(f"sequence {sequence[i]}: a chunk of it has no token on rank {pieces.rank[rows[i]]}")
    if (i := _first(chunk_end != chunk_end[first][np.cumsum(new) - 1])) is not None:
        raise PlanError(f"sequence {sequence[i]}: pieces of the chunk at token {chunk_begin[i]} disagree on its end")
    before = np.where(np.concatenate([[False], same])[first], chunk_end[first - 1], 0)
    is_last = np.concatenate([sequence[first][1:] != sequence[first][:-1], [True]])
    wrong = (chunk_begin[first] != before) | (chunk_end[first] <= chunk_begin[first])
    wrong |= is_last & (chunk_end[first] != plan.lengths[sequence[first]])
    if (i := _first(wrong)) is not None:
        row = first[i]
        raise PlanError(
            f"sequence {sequence[row]} has {plan.lengths[sequence[row]]} tokens and a chunk "
            f"[{chunk_begin[row]}, {chunk_end[row]}): chunks must follow each other from 0 to the end"
        )
    return np.append(first, len(rows)), token_end - token_begin


def _check_chunk_order(plan: StepPlan) -> None:
    pieces = plan.pieces
    assert pieces.cp_index is not None and pieces.token_begin is not None
    by_index = np.lexsort((pieces.token_begin, pieces.cp_index, pieces.sequence))
    sequence, rank, micro_batch = (c[by_index] for c in (pieces.sequence, pieces.rank, pieces.micro_batch))
    following = (np.diff(sequence) == 0) & (np.diff(pieces.cp_index[by_index]) == 0)
    if (i := _first(following & ((np.diff(rank) != 0) | (np.diff(micro_batch) != 1)))) is not None:
        raise PlanError(
            f"sequence {sequence[i]}: the chunk after micro-batch {micro_batch[i]} of rank {rank[i]} is in micro-batch "
            f"{micro_batch[i + 1]} of rank {rank[i + 1]}; it must be in the next one of the same rank"
        )


def _check_block_coverage(plan: StepPlan) -> None:
    pieces = plan.pieces
    token_begin, token_end = pieces.token_begin, pieces.token_end
    assert token_begin is not None and token_end is not None
    if (i := _first(pieces.tokens != token_end - token_begin)) is not None:
        raise PlanError(
            f"sequence {pieces.sequence[i]} on rank {pieces.rank[i]} says {pieces.tokens[i]} tokens for block "
            f"[{token_begin[i]}, {token_end[i]})"
        )
    rows, begin = plan.sequence_rows()
    counts = np.diff(begin)
    if (i := _first(counts == 0)) is not None:
        raise PlanError(f"sequence {i} ({plan.lengths[i]} tokens) is not placed on any rank")
    is_first = np.zeros(len(rows), dtype=bool)
    is_first[begin[:-1]] = True
    previous_end = np.where(is_first, 0, np.concatenate([[0], token_end[rows][:-1]]))
    if (i := _first(token_begin[rows] != previous_end)) is not None:
        row = rows[i]
        raise PlanError(
            f"sequence {pieces.sequence[row]}: the block at {token_begin[row]} on rank {pieces.rank[row]} must begin "
            f"at {previous_end[i]}, where the one before ends"
        )
    last = token_end[rows[begin[1:] - 1]]
    if (i := _first(last != plan.lengths)) is not None:
        raise PlanError(f"sequence {i} has {plan.lengths[i]} tokens; its blocks end at {last[i]}")


def _check_micro_batch_numbers(plan: StepPlan) -> None:
    pieces = plan.pieces
    if not len(pieces):
        return
    starts = np.diff(pieces.rank) != 0
    step = np.where(starts, pieces.micro_batch[1:], np.diff(pieces.micro_batch))
    allowed = np.where(starts, step == 0, step <= 1)
    wrong = np.concatenate([[pieces.micro_batch[0] != 0], ~allowed])
    if (row := _first(wrong)) is not None:
        raise PlanError(
            f"rank {pieces.rank[row]} has a micro-batch {pieces.micro_batch[row]} (sequence {pieces.sequence[row]}) "
            "but none before it: micro-batches are numbered 0, 1, 2, ... without gaps"
        )


def _check_memory(plan: StepPlan) -> float:
    pieces = plan.pieces
    if not len(pieces):
        return 0.0
    ids = plan.micro_batch_ids()
    held = np.bincount(ids, weights=resident_tokens(pieces.tokens, pieces.offload_ratio, plan.num_layers))
    worst = int(held.argmax())
    if held[worst] > plan.tokens_per_rank * (1 + 1e-9):
        row = _first(ids == worst)
        assert row is not None
        raise PlanError(
            f"micro-batch {pieces.micro_batch[row]} of rank {pieces.rank[row]} (first sequence {pieces.sequence[row]}) "
            f"holds {held[worst]:.6g} tokens; tokens_per_rank is {plan.tokens_per_rank}"
        )
    if plan.layout == "chunks":
        _check_kept(plan)
    return float(held[worst])


def _check_kept(plan: StepPlan) -> None:
    most = in_flight_tokens(plan)
    limit = plan.pp_size * plan.tokens_per_rank
    rank, stage = (int(i) for i in np.unravel_index(int(most.argmax()), most.shape))
    if most[rank, stage] > limit * (1 + 1e-9):
        raise PlanError(
            f"rank {rank} holds {most[rank, stage]:.6g} tokens at stage {stage} between forward and backward; "
            f"pp_size * tokens_per_rank is {limit}"
        )


def _check_order(plan: StepPlan) -> int:
    if not len(plan.pieces):
        return 0
    gangs = gangs_of(plan)
    by_gang = np.lexsort((gangs.rank, gangs.gang))
    twice = (np.diff(gangs.gang[by_gang]) == 0) & (np.diff(gangs.rank[by_gang]) == 0)
    if (i := _first(twice)) is not None:
        first, second = by_gang[i], by_gang[i + 1]
        ids = plan.micro_batch_ids()
        rows = [_first(ids == m) for m in (first, second)]
        names = [plan.pieces.micro_batch[row] for row in rows]
        sequence = plan.pieces.sequence[rows[0]]
        raise PlanError(
            f"rank {gangs.rank[first]} would have to run micro-batches {names[0]} (sequence {sequence}) and {names[1]} "
            "at the same time: they belong to one gang"
        )
    cycle = find_cycle(*operation_edges(plan, gangs))
    if cycle:
        raise PlanError(f"the order of micro-batches has a cycle and would hang: {_describe_cycle(plan, cycle)}")
    return int((np.bincount(gangs.gang) > 1).sum())


def _describe_cycle(plan: StepPlan, cycle: list[int]) -> str:
    gangs = gangs_of(plan)
    ids = plan.micro_batch_ids()
    words = []
    for node in [*cycle[:4], cycle[0]] if len(cycle) <= 4 else cycle[:5]:
        gang, stage, direction = node, 0, 0
        if plan.pp_size > 1:
            gang, stage, direction = node // (2 * plan.pp_size), node // 2 % plan.pp_size, node % 2
        rows = np.flatnonzero(gangs.gang[ids] == gang)
        sequence = plan.pieces.sequence[rows[0]]
        ranks = ", ".join(str(r) for r in np.unique(plan.pieces.rank[rows])[:4])
        name = f"sequence {sequence} on rank {ranks}"
        if plan.pp_size > 1:
            name = f"{'backward' if direction == BACKWARD else 'forward'} of {name} at stage {stage}"
        words.append(name)
    return " before ".join(words) + (" ..." if len(cycle) > 4 else "")
