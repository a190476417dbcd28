"""What block plans cost: a block of queries against every earlier token of its sequence, wherever those lie.

The block [b, e) of a sequence covers the causal area a*(e^2 - b^2). Its keys arrive as blocks of w = e - b tokens and
up to `MERGED_STAGES` of them run as one kernel; a kernel over q x k pairs counts as a causal block of edge sqrt(2*q*k),
which gives it the same efficiency curve as a ring step. A rank fetches each token before its last block of a sequence
once, those it holds itself excepted, in rounds of that many blocks (latency and floor once a round), over the
inter-node link if any part of the sequence is on another node; what the attention of those blocks does not hide is
added to the last of them.

Invariant: a sequence in one block costs exactly what it costs at cp_degree 1. Cost: O(n log n) in blocks.
"""

import numpy as np
import numpy.typing as npt

from bytescale.arrays import FloatArray
from bytescale.cost.model import CostModel, DirectionCost
from bytescale.plan.step_plan import StepPlan

MERGED_STAGES = 16
"""Blocks of keys that one kernel launch covers, as in the published block-placement system."""


def block_times_s(plan: StepPlan, cost: CostModel) -> tuple[FloatArray, FloatArray]:
    """Forward and backward time per layer of every piece of a block plan, g and head excluded."""
    pieces = plan.pieces
    assert pieces.token_begin is not None and pieces.token_end is not None
    begin, end = pieces.token_begin.astype(np.float64), pieces.token_end.astype(np.float64)
    fetched, group, last = _fetched_tokens(plan)
    crosses = _crosses_nodes(plan, cost)
    times = []
    for direction in (cost.forward, cost.backward):
        causal_s = attention_s(cost, direction, begin, end)
        total = direction.token_s * (end - begin) + causal_s
        if cost.has_communication:
            num_bytes = fetched * direction.transfer * cost.kv_bytes_per_token
            wire_s = num_bytes / np.where(crosses, cost.inter_node.bytes_per_s, cost.intra_node.bytes_per_s)
            latency_s = np.where(crosses, cost.inter_node.latency_s, cost.intra_node.latency_s)
            rounds = np.ceil(fetched / np.maximum(end - begin, 1.0) / MERGED_STAGES)
            fetch_s = np.maximum(wire_s + rounds * latency_s, rounds * cost.ring_step_floor_s)
            hidden_s = np.bincount(group, weights=causal_s)[group]
            total = total + np.where(last & (fetched > 0), np.maximum(0.0, fetch_s - hidden_s), 0.0)
        times.append(total)
    forward_s, backward_s = times
    return forward_s, backward_s + forward_s if cost.recompute else backward_s


def attention_s(cost: CostModel, direction: DirectionCost, begin: FloatArray, end: FloatArray) -> FloatArray:
    """Causal attention of the blocks [begin, end) in one layer and direction."""
    width = end - begin
    num_kernels = np.ceil(begin / np.maximum(width, 1.0) / MERGED_STAGES)
    per_kernel = np.divide(begin, num_kernels, out=np.zeros_like(begin), where=num_kernels > 0)
    overhead = width + num_kernels * np.sqrt(2.0 * width * per_kernel)
    return np.asarray(direction.square_s * (end**2 - begin**2 + cost.block_half_tokens * overhead), np.float64)


def _fetched_tokens(plan: StepPlan) -> tuple[FloatArray, npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Per piece: tokens fetched (non-zero on the last of a rank and sequence only), (sequence, rank) group, is last."""
    pieces = plan.pieces
    assert pieces.token_begin is not None
    num = len(pieces)
    order = np.lexsort((pieces.token_begin, pieces.rank, pieces.sequence))
    key = pieces.sequence[order] * plan.hdp_size + pieces.rank[order]
    new = np.concatenate([[True], key[1:] != key[:-1]]) if num else np.zeros(0, dtype=bool)
    group_sorted = np.cumsum(new) - 1
    held = np.bincount(group_sorted, weights=pieces.tokens[order]) if num else np.zeros(0)
    last_sorted = np.concatenate([new[1:], [True]]) if num else new
    tokens = pieces.tokens[order]
    fetched_sorted = np.where(last_sorted, pieces.token_begin[order] - (held[group_sorted] - tokens), 0.0)
    fetched, group, last = np.zeros(num), np.zeros(num, np.int64), np.zeros(num, dtype=bool)
    fetched[order], group[order], last[order] = fetched_sorted, group_sorted, last_sorted
    return fetched, group, last


def _crosses_nodes(plan: StepPlan, cost: CostModel) -> npt.NDArray[np.bool_]:
    node = plan.pieces.rank // cost.ranks_per_node
    low = np.full(plan.num_sequences, np.iinfo(np.int64).max)
    high = np.zeros(plan.num_sequences, np.int64)
    np.minimum.at(low, plan.pieces.sequence, node)
    np.maximum.at(high, plan.pieces.sequence, node)
    return np.asarray((low != high)[plan.pieces.sequence])
