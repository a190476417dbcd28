"""The memory rule: how many tokens a rank holds of its pieces, in every form in which that is asked.

Of l layers on a rank, k = min(2, l) always stay (the running one and the one in flight; ByteScale Eq. 3). A piece of n
tokens with offload ratio r keeps

    n * kept_share(r) = n * (k + (1 - r)(l - k)) / l

token-equivalents, and the pieces of a micro-batch together keep at most C = tokens_per_rank. Invariant: the functions
here are one formula solved for different unknowns. Cost: O(1) an element, `*_in_flight` O(pieces * pp_size).
"""

import math
from typing import Any

import numpy as np

from bytescale.arrays import FloatArray, IntArray
from bytescale.plan.order import most_in_flight
from bytescale.plan.step_plan import StepPlan

NUM_RESIDENT_LAYERS = 2
"""Layers whose activations never leave the device: the running one and the one in flight (paper, Eq. 3)."""


def kept_share(offload_ratio: Any, num_layers: int) -> Any:
    """Share of the activations of a piece that stays on the device. Same shape as `offload_ratio`."""
    resident = min(NUM_RESIDENT_LAYERS, num_layers)
    return (resident + (1.0 - offload_ratio) * (num_layers - resident)) / num_layers


def resident_tokens(tokens: IntArray, offload_ratio: FloatArray, num_layers: int) -> FloatArray:
    """Token-equivalents that pieces keep on the device. Same shape as `tokens`."""
    kept: FloatArray = tokens * kept_share(offload_ratio, num_layers)
    return kept


def capacity_tokens(tokens_per_rank: int, offload_ratio: float, num_layers: int) -> int:
    """Most tokens of a micro-batch that keep no more than `tokens_per_rank` at that ratio."""
    return math.floor(tokens_per_rank / float(kept_share(offload_ratio, num_layers)) * (1 + 1e-12))


def least_offload_ratio(tokens: IntArray, tokens_per_rank: int, num_layers: int) -> FloatArray:
    """Least ratio with which pieces of `tokens` keep no more than `tokens_per_rank`; above 1 where none does."""
    resident = min(NUM_RESIDENT_LAYERS, num_layers)
    if resident == num_layers:
        return np.where(tokens > tokens_per_rank, np.inf, 0.0)
    return np.maximum(0.0, (1.0 - tokens_per_rank / tokens) * num_layers / (num_layers - resident))


def in_flight_tokens(plan: StepPlan) -> FloatArray:
    """Most token-equivalents between forward and backward, kept gradients counted. Shape [hdp_size, pp_size]."""
    pieces = plan.pieces
    kept = resident_tokens(pieces.tokens, pieces.offload_ratio, plan.num_layers)
    if plan.layout == "chunks":
        assert pieces.token_begin is not None and pieces.token_end is not None
        is_part = pieces.token_end - pieces.token_begin < plan.lengths[pieces.sequence]
        kept = kept + np.where(is_part, plan.kept_gradient_share * pieces.tokens, 0.0)
    return _most_in_flight(plan, kept)


def offloaded_in_flight_tokens(plan: StepPlan) -> FloatArray:
    """Most token-equivalents that are away from the device at one time. Shape [hdp_size, pp_size]."""
    pieces = plan.pieces
    return _most_in_flight(plan, pieces.tokens - resident_tokens(pieces.tokens, pieces.offload_ratio, plan.num_layers))


def _most_in_flight(plan: StepPlan, piece_values: FloatArray) -> FloatArray:
    num = int(plan.num_micro_batches().sum())
    held = np.bincount(plan.micro_batch_ids(), weights=piece_values, minlength=num)
    return most_in_flight(plan, np.asarray(held, np.float64))
