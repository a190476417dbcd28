"""The longest sequence that a model can be trained on by a cluster, and which limit binds.

Memory of a GPU after states and logits gives C, the tokens_per_rank to set: at stage s of a pipeline of P, P - s
micro-batches of C tokens are in flight (1F1B), and ring buffers hold the keys and values of the largest piece. With
offloading a piece may have up to l / k times as many tokens (k = 2 of l layers stay, `plan.memory`), as far as the
host's memory holds what leaves; with recomputation a layer keeps its input. All HDP ranks serve the one sequence, so
context = hdp_size * tokens of a rank.

Each way is reported with the time of a step of that one sequence, since a context is of no use if its step takes hours.
Invariant: any plan with that tokens_per_rank and that offloading passes `memory.peak_memory` on this cluster, and one
token a rank more does not. Cost: O(log C).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bytescale.arrays import ceil_div
from bytescale.cost.model import ClusterSpec, CostModel, ModelShape, rank_time_s, with_recompute
from bytescale.cost.predict import stage_layers
from bytescale.errors import UserError
from bytescale.plan.memory import capacity_tokens, kept_share, least_offload_ratio
from bytescale.simulator.memory import (
    HEAD_CHUNK_TOKENS,
    HOST_SHARE,
    LOGIT_BYTES,
    layer_bytes_per_token,
    state_bytes,
)


@dataclass(frozen=True)
class ContextLimit:
    """One way to reach a context.

    Attributes:
        way: what is done to save memory.
        tokens_per_rank: C, the capacity to set.
        tokens: of one rank, what is offloaded included.
        max_length: of the one sequence.
        step_time_s: forward and backward of it, on all ranks.
        binds: which limit decides.
    """

    way: str
    tokens_per_rank: int
    tokens: int
    max_length: int
    step_time_s: float
    binds: str


@dataclass(frozen=True)
class _Fleet:
    """Who trains where.

    Attributes:
        layers: on one rank, as plans count them, ceil(layers / pp_size).
        given: C, where it is stated and not derived from memory.
    """

    model: ModelShape
    cluster: ClusterSpec
    cost: CostModel
    hdp_size: int
    tp_size: int
    pp_size: int
    given: int | None

    @property
    def layers(self) -> int:
        return ceil_div(self.model.num_layers, self.pp_size)


def context_limits(
    model: ModelShape,
    cluster: ClusterSpec,
    cost: CostModel,
    *,
    hdp_size: int,
    tp_size: int = 1,
    pp_size: int = 1,
    tokens_per_rank: int | None = None,
) -> list[ContextLimit]:
    """The ways in order of effort: as is, offload that hides, all that may be offloaded, recomputation.

    Args:
        model, cluster, cost: who trains where.
        hdp_size, tp_size, pp_size: the layout.
        tokens_per_rank: C; None derives it from memory.

    Raises:
        UserError: the states alone do not fit.
    """
    fleet = _Fleet(model, cluster, cost, hdp_size, tp_size, pp_size, tokens_per_rank)
    capacity, binds = _capacity(fleet, cost, largest_share=1.0)
    limits = [_limit(fleet, "no offload", cost, capacity, capacity, binds)]
    capacity, binds = _capacity(fleet, cost, largest_share=1.0 / kept_share(1.0, fleet.layers))
    most = capacity_tokens(capacity, 1.0, fleet.layers)
    in_host = _most(capacity, most, lambda tokens: _host_bytes(fleet, capacity, tokens) <= _host_limit(fleet))
    hidden = _most(capacity, in_host, lambda tokens: _hides(fleet, capacity, tokens))
    whole = "host memory" if in_host < most else binds
    for way, tokens, why in (
        ("offload that hides behind compute", hidden, "copy bandwidth" if hidden < in_host else whole),
        ("offload of all but two layers", in_host, whole),
    ):
        limits.append(_limit(fleet, way, cost, capacity, tokens, why))
    if tokens_per_rank is None:
        again = with_recompute(cost)
        capacity, binds = _capacity(fleet, again, largest_share=1.0)
        limits.append(_limit(fleet, "recomputation of every layer", again, capacity, capacity, binds))
    return limits


def _capacity(fleet: _Fleet, cost: CostModel, largest_share: float) -> tuple[int, str]:
    """C, and what binds it; pieces have up to `largest_share` * C tokens."""
    if fleet.given is not None:
        return fleet.given, "tokens_per_rank"
    states = state_bytes(fleet.model, tp_size=fleet.tp_size, pp_size=fleet.pp_size, hdp_size=fleet.hdp_size)
    head = HEAD_CHUNK_TOKENS * fleet.model.vocab_size * LOGIT_BYTES / fleet.tp_size
    free = fleet.cluster.memory_bytes - states - head
    in_flight = np.arange(fleet.pp_size, 0, -1) * stage_layers(cost, fleet.pp_size)
    per_token = float(in_flight.max()) * layer_bytes_per_token(fleet.model, cost)
    per_token += 2 * cost.kv_bytes_per_token * largest_share
    if cost.recompute:
        per_token += cost.activation_bytes_per_token
    if free < per_token:
        raise UserError(
            f"{fleet.model.name} does not fit: states take {states / 2**30:.1f} GiB a GPU, {fleet.cluster.name} GPUs "
            f"have {fleet.cluster.memory_bytes / 2**30:.1f} GiB; raise --tp-size or --pp-size"
        )
    return int(free / per_token), "device memory"


def _ratio(fleet: _Fleet, capacity: int, tokens: int) -> float:
    """Offload ratio with which `tokens` of a rank keep no more than `capacity`."""
    return min(1.0, float(least_offload_ratio(np.array(tokens), capacity, fleet.layers)))


def _host_limit(fleet: _Fleet) -> float:
    return HOST_SHARE * fleet.cluster.host_memory_bytes


def _host_bytes(fleet: _Fleet, capacity: int, tokens: int) -> float:
    """Bytes offloaded of the micro-batches in flight, at the stage that offloads most."""
    in_flight = np.arange(fleet.pp_size, 0, -1) * stage_layers(fleet.cost, fleet.pp_size)
    away = 1.0 - float(kept_share(_ratio(fleet, capacity, tokens), fleet.layers))
    return float(in_flight.max()) * away * tokens * layer_bytes_per_token(fleet.model, fleet.cost)


def _hides(fleet: _Fleet, capacity: int, tokens: int) -> bool:
    """Whether the copy of a layer hides behind its forward, when all ranks serve one sequence."""
    cost, edge = fleet.cost, float(tokens)
    copy_s = _ratio(fleet, capacity, tokens) * cost.activation_bytes_per_token * edge / cost.copy_bytes_per_s
    return copy_s <= cost.forward.token_s * edge + fleet.hdp_size * cost.forward.square_s * edge * edge


def _most(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number of tokens in low..high that fits; `low` is taken to fit."""
    while low < high:
        middle = math.ceil((low + high) / 2)
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _limit(fleet: _Fleet, way: str, cost: CostModel, capacity: int, tokens: int, binds: str) -> ContextLimit:
    length = tokens * fleet.hdp_size
    step_s = float(rank_time_s(cost, length, fleet.hdp_size, _ratio(fleet, capacity, tokens)))
    return ContextLimit(way, capacity, tokens, length, step_s, binds)
