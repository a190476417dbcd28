"""The longest sequence that a model and a cluster can train, and what binds.

Memory a rank has for activations after states and buffers gives C, the tokens it holds; with everything offloaded that
may go, l / k times as many (k = 2 layers stay, rule 2 of the validator); with recomputation a layer keeps its input.
All HDP ranks serve the one sequence, so context = hdp_size * tokens of a rank. Pipelines hold pp_size micro-batches at
the first stage; a step of one sequence holds one.

Each way is reported with the time of a step of that one sequence, since a context that nobody waits for is none.
Invariant: the reported context passes the memory rule and one token a rank more does not. Cost: O(1).
"""

import math
from dataclasses import dataclass

from bytescale.cost.model import ClusterSpec, CostModel, ModelShape, rank_time_s, with_recompute
from bytescale.errors import UserError
from bytescale.plan.memory import NUM_RESIDENT_LAYERS
from bytescale.simulator.memory import HEAD_CHUNK_TOKENS, LOGIT_BYTES, layer_bytes_per_token, state_bytes


@dataclass(frozen=True)
class ContextLimit:
    """One way to reach a context.

    Attributes:
        way: what is done to save memory.
        tokens_per_rank: tokens of one rank.
        max_length: of the one sequence.
        step_time_s: forward and backward of it, on all ranks.
        binds: which limit decides.
    """

    way: str
    tokens_per_rank: int
    max_length: int
    step_time_s: float
    binds: str


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
        tokens_per_rank: C, if it is given and not to be derived from memory.

    Raises:
        UserError: the states alone do not fit.
    """
    layers = -(-model.num_layers // pp_size)
    resident = min(NUM_RESIDENT_LAYERS, layers)
    capacity = tokens_per_rank or _capacity(model, cluster, cost, hdp_size, tp_size, pp_size, layers)
    given = "tokens_per_rank" if tokens_per_rank else "device memory"
    limits = [_limit("no offload", capacity, given, cost, hdp_size, 0.0)]
    hidden = _hidden_tokens(cost, capacity, layers, resident, hdp_size)
    most = math.floor(capacity * layers / resident)
    binds = "copy bandwidth" if hidden < most else given
    for way, tokens, why in (
        ("offload that hides behind compute", hidden, binds),
        ("offload of all but two layers", most, given),
    ):
        limits.append(_limit(way, tokens, why, cost, hdp_size, _ratio(capacity, tokens, layers)))
    if tokens_per_rank is None:
        again = with_recompute(cost)
        tokens = _capacity(model, cluster, again, hdp_size, tp_size, pp_size, layers)
        limits.append(_limit("recomputation of every layer", tokens, given, again, hdp_size, 0.0))
    return limits


def _capacity(
    model: ModelShape, cluster: ClusterSpec, cost: CostModel, hdp_size: int, tp_size: int, pp_size: int, layers: int
) -> int:
    """Tokens whose activations, ring buffers and logits fit beside the states."""
    states = state_bytes(model, tp_size=tp_size, pp_size=pp_size, hdp_size=hdp_size)
    head = HEAD_CHUNK_TOKENS * model.vocab_size * LOGIT_BYTES / tp_size
    free = cluster.memory_bytes - states - head
    per_token = layers * layer_bytes_per_token(model, cost) + 2 * cost.kv_bytes_per_token
    if cost.recompute:
        per_token += cost.activation_bytes_per_token
    if free < per_token:
        raise UserError(
            f"{model.name} does not fit: states take {states / 1e9:.1f} GB a GPU, a {cluster.name} has "
            f"{cluster.memory_bytes / 1e9:.0f} GB; raise --tp-size or --pp-size"
        )
    return int(free / per_token)


def _ratio(capacity: int, tokens: int, layers: int) -> float:
    """Offload ratio with which `tokens` keep no more than `capacity`."""
    resident = min(NUM_RESIDENT_LAYERS, layers)
    if tokens <= capacity or layers == resident:
        return 0.0
    return min(1.0, (1.0 - capacity / tokens) * layers / (layers - resident))


def _hidden_tokens(cost: CostModel, capacity: int, layers: int, resident: int, hdp_size: int) -> int:
    """Most tokens of a rank whose copies a forward layer hides; the sequence is all ranks long."""
    low, high = capacity, math.floor(capacity * layers / resident)
    while low < high:
        middle = (low + high + 1) // 2
        copy_s = _ratio(capacity, middle, layers) * cost.activation_bytes_per_token * middle / cost.copy_bytes_per_s
        edge = float(middle)
        layer_s = cost.forward.token_s * edge + hdp_size * cost.forward.square_s * edge * edge
        low, high = (middle, high) if copy_s <= layer_s else (low, middle - 1)
    return low


def _limit(way: str, tokens: int, binds: str, cost: CostModel, hdp_size: int, ratio: float) -> ContextLimit:
    length = tokens * hdp_size
    step_s = float(rank_time_s(cost, length, hdp_size, ratio))
    return ContextLimit(way, tokens, length, step_s, binds)
