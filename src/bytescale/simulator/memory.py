"""Peak device memory of every rank and stage.

    states       parameters (bf16) + gradients (fp32) + optimizer (three fp32 values a parameter), of one GPU's part;
                 `zero1` shards the optimizer over HDP, `fsdp` shards all three and keeps whole parameters and
                 gradients while the step computes, as the runtime does;
    activations  token-equivalents of every micro-batch in flight (rule 2 of the validator) * Act(s) * layers of the
                 stage, gradients of kept keys and values included. Stage s of P holds up to P - s micro-batches in
                 1F1B. With recomputation a layer keeps its input, and one layer is whole at a time;
    buffers      two keys-and-values blocks of the largest piece (for a chunk of all it attends to), and the head's
                 logits for a chunk of tokens;
    host         what is offloaded of every micro-batch in flight, in host memory.

Allocator slack and workspaces are not in it. Cost: O(pieces + micro-batches * pp_size).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from bytescale.arrays import FloatArray, ceil_div
from bytescale.cost.model import CostModel, ModelShape
from bytescale.cost.predict import stage_layers
from bytescale.plan.memory import in_flight_tokens, offloaded_in_flight_tokens, resident_tokens
from bytescale.plan.step_plan import StepPlan
from bytescale.simulator.overheads import GRADIENT_BYTES, PARAMETER_BYTES

Sharding = Literal["zero1", "fsdp"]

OPTIMIZER_BYTES = 12
HOST_SHARE = 0.5
"""Part of a host's memory that offloading may take, as a run does by default."""
HEAD_CHUNK_TOKENS = 1024
LOGIT_BYTES = 4


@dataclass(frozen=True)
class PeakMemory:
    """Bytes per GPU. `activation_bytes`, `host_bytes` and `total_bytes` have shape [hdp_size, pp_size]."""

    state_bytes: float
    buffer_bytes: float
    activation_bytes: FloatArray
    host_bytes: FloatArray

    @property
    def total_bytes(self) -> FloatArray:
        return self.activation_bytes + self.state_bytes + self.buffer_bytes


def state_bytes(model: ModelShape, *, tp_size: int, pp_size: int, hdp_size: int, sharding: Sharding = "fsdp") -> float:
    """Parameters, gradients and optimizer states of one GPU while a step computes."""
    parameters = model.num_parameters / (tp_size * pp_size)
    whole, sharded = PARAMETER_BYTES + GRADIENT_BYTES, OPTIMIZER_BYTES
    if sharding == "fsdp":
        sharded += PARAMETER_BYTES + GRADIENT_BYTES
    return parameters * (whole + sharded / hdp_size)


def buffer_bytes(model: ModelShape, cost: CostModel, *, tp_size: int, largest_piece: int) -> float:
    """Ring buffers and logits of one GPU."""
    head = min(HEAD_CHUNK_TOKENS, max(largest_piece, 1)) * model.vocab_size * LOGIT_BYTES / tp_size
    return 2 * largest_piece * cost.kv_bytes_per_token + head


def layer_bytes_per_token(model: ModelShape, cost: CostModel) -> float:
    """What one layer keeps of one token until its backward."""
    if not cost.recompute:
        return cost.activation_bytes_per_token
    shared = cost.activation_bytes_per_token / model.activation_bytes_per_token
    return model.hidden_size * model.dtype_bytes * shared


def peak_memory(plan: StepPlan, model: ModelShape, cost: CostModel, *, tp_size: int = 1) -> PeakMemory:
    """The peak of every rank and stage."""
    pieces = plan.pieces
    layers = stage_layers(cost, plan.pp_size)
    activation_bytes = in_flight_tokens(plan) * layer_bytes_per_token(model, cost) * layers
    if cost.recompute:
        activation_bytes += _fullest_micro_batch(plan)[:, None] * cost.activation_bytes_per_token
    travelling = pieces.tokens
    if plan.layout == "chunks":
        assert pieces.token_end is not None and pieces.cp_degree is not None
        travelling = np.maximum(travelling, ceil_div(pieces.token_end, pieces.cp_degree))
    largest = int(travelling.max(initial=0))
    return PeakMemory(
        state_bytes(model, tp_size=tp_size, pp_size=plan.pp_size, hdp_size=plan.hdp_size),
        buffer_bytes(model, cost, tp_size=tp_size, largest_piece=largest),
        activation_bytes,
        offloaded_in_flight_tokens(plan) * layer_bytes_per_token(model, cost) * layers,
    )


def _fullest_micro_batch(plan: StepPlan) -> FloatArray:
    """Most token-equivalents of one micro-batch of each rank. Shape [hdp_size]."""
    pieces, counts = plan.pieces, plan.num_micro_batches()
    kept = resident_tokens(pieces.tokens, pieces.offload_ratio, plan.num_layers)
    held = np.bincount(plan.micro_batch_ids(), weights=kept, minlength=int(counts.sum()))
    fullest = np.zeros(plan.hdp_size)
    np.maximum.at(fullest, np.repeat(np.arange(plan.hdp_size), counts), held)
    return fullest
