"""How many tokens of keys and values the attention of a plan sends, exactly.

Ranks of a sequence exchange directly. The rank with `cp_index` k sends its KV to the D - 1 others: to a larger index
the front run alone (the back run lies behind every query there), to a smaller one the whole piece. With n tokens in
the piece and f in its front run that is (D - 1 - k) * f + k * n tokens for one forward pass of one layer, less what
would go to a piece without queries for it (sequences shorter than twice their degree). A block plan
sends each block to every other rank that holds a later block of the sequence, once. A chunk sends what a rank keeps of
the earlier chunks too, to all others.

The backward sends the KV again and the partial gradients back, the same counts twice; recomputation repeats the
forward. Cost: O(pieces), closed sums.
"""

import numpy as np
import numpy.typing as npt

from bytescale.arrays import IntArray, ceil_div, exclusive_sum
from bytescale.cost.model import ModelShape
from bytescale.plan.step_plan import StepPlan


def attention_traffic_tokens(plan: StepPlan) -> IntArray:
    """KV tokens that each rank sends in one forward pass of one layer. Shape [hdp_size]."""
    pieces = plan.pieces
    sent = _block_tokens(plan) if plan.layout == "blocks" else _zigzag_tokens(plan)
    totals = np.zeros(plan.hdp_size, dtype=np.int64)
    np.add.at(totals, pieces.rank, sent)
    return totals


def attention_bytes(plan: StepPlan, kv_bytes_per_token: float, num_layers: int, checkpointing: bool = False) -> int:
    """Bytes sent by attention in one step, all ranks together.

    Args:
        plan: the plan.
        kv_bytes_per_token: bytes of K and V of one token in one layer.
        num_layers: layers of the whole model.
        checkpointing: every layer is recomputed in the backward.
    """
    passes = 4 if checkpointing else 3
    return round(int(attention_traffic_tokens(plan).sum()) * kv_bytes_per_token * num_layers * passes)


def tensor_bytes(plan: StepPlan, model: ModelShape, tp_size: int, checkpointing: bool = False) -> int:
    """Bytes that the collectives of tensor parallelism send in one step of a dense model, all ranks together.

    A gather or sum of the hidden states of T' rows (tokens, padded to a multiple of tp_size) sends (tp_size - 1) * T'
    of them. A layer has four in the forward, six in the backward, where the inputs of its two blocks are gathered
    again, and three when it is recomputed; embedding and head have two each, the head two fp32 numbers a row and rank
    besides. The one-token micro-batch of the reduction does the same on every HDP rank and stage.
    """
    tokens = np.bincount(plan.micro_batch_ids(), weights=plan.pieces.tokens)
    rows = int((ceil_div(tokens.astype(np.int64), tp_size) * tp_size).sum()) + plan.hdp_size * tp_size
    hidden = model.num_layers * (13 if checkpointing else 10) + 4
    return (tp_size - 1) * rows * (hidden * model.hidden_size * model.dtype_bytes + 2 * 4 * tp_size)


def _zigzag_tokens(plan: StepPlan) -> IntArray:
    pieces = plan.pieces
    degree, index = pieces.cp_degree, pieces.cp_index
    assert degree is not None and index is not None
    rows, begin = plan.sequence_rows()
    length, degree, index = plan.lengths[pieces.sequence[rows]], degree[rows], index[rows]
    tokens = pieces.tokens[rows]
    kept = np.zeros_like(tokens)
    if plan.layout == "chunks":
        token_begin, token_end = plan.chunk_bounds(rows)
        length = token_end - token_begin
        new = np.concatenate([[True], (np.diff(pieces.sequence[rows]) != 0) | (np.diff(token_begin) != 0)])
        kept = _kept_tokens(pieces.sequence[rows], index, tokens)
        begin = np.append(np.flatnonzero(new), len(rows))
    front = (index + 1) * length // degree // 2 - index * length // degree // 2
    behind = _count_of_sequence(tokens > 0, begin, after=True)
    before = _count_of_sequence(tokens - front > 0, begin, after=False)
    sent = np.zeros(len(rows), dtype=np.int64)
    sent[rows] = behind * front + before * tokens + (degree - 1) * kept
    return sent


def _kept_tokens(sequence: IntArray, index: IntArray, tokens: IntArray) -> IntArray:
    """Tokens that each rank of a sequence keeps from its earlier chunks; rows in the order of the chunks."""
    order = np.lexsort((index, sequence))
    running = exclusive_sum(tokens[order])
    new = np.concatenate([[True], (np.diff(sequence[order]) != 0) | (np.diff(index[order]) != 0)])
    first = np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))
    kept = np.zeros_like(tokens)
    kept[order] = running - running[first]
    return kept


def _count_of_sequence(mask: npt.NDArray[np.bool_], begin: IntArray, *, after: bool) -> IntArray:
    """For each row, how many rows of its sequence or chunk after (or before) it are true; rows grouped by `begin`."""
    seen = np.concatenate([[0], np.cumsum(mask)])
    counts = np.diff(begin)
    first, last = np.repeat(seen[begin[:-1]], counts), np.repeat(seen[begin[1:]], counts)
    return np.asarray(last - seen[1:] if after else seen[:-1] - first, np.int64)


def _block_tokens(plan: StepPlan) -> IntArray:
    """Per block: its tokens times the distinct other ranks among the later blocks of its sequence."""
    pieces = plan.pieces
    rows, begin = plan.sequence_rows()
    sequence, rank = pieces.sequence[rows], pieces.rank[rows]
    num_rows = len(rows)
    key = sequence * plan.hdp_size + rank
    reverse_first = np.unique(key[::-1], return_index=True)[1]
    is_last = np.zeros(num_rows, dtype=bool)
    is_last[num_rows - 1 - reverse_first] = True
    seen = np.concatenate([[0], np.cumsum(is_last)])
    end_of_sequence = begin[1:][sequence]
    later_ranks = seen[end_of_sequence] - seen[np.arange(num_rows) + 1] - ~is_last
    sent = np.zeros(num_rows, dtype=np.int64)
    sent[rows] = later_ranks * pieces.tokens[rows]
    return sent
