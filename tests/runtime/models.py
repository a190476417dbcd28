"""Small random decoders of several architectures, and one training step on a plan written by hand."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bytescale.config.schema import ModelConfig, ParallelConfig
from bytescale.data import GlobalBatch, StepData, TokenMicroBatch
from bytescale.plan.share import rank_share
from bytescale.plan.step_plan import StepPlan
from bytescale.plan.zigzag import piece_positions
from bytescale.runtime.attention.kernels import CpuKernel
from bytescale.runtime.flat import flat_shapes
from bytescale.runtime.fsdp import full_gradients, shard_model
from bytescale.runtime.model.decoder import LossModel, build_decoder, recompute_layers
from bytescale.runtime.model.hf_config import load_model_config
from bytescale.runtime.model.stages import layer_ranges, stage_model
from bytescale.runtime.sharded import whole_tensor
from bytescale.runtime.world import World, Wrap, join_groups
from bytescale.train.step import StepResult, run_step
from tests.ranks import Ranks

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 4096},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16},
}
UNEVEN: dict[str, Any] = {
    "hidden_size": 1025,
    "intermediate_size": 97,
    "head_dim": 8,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
}
"""Sizes some of whose weights two and four ranks cannot cut evenly, so that they are stored as columns."""

WITH_BUFFERS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "head_dim": 8,
}
"""Sizes of `glm4_moe`, whose routers hold a buffer that is stored with the weights."""
MAX_CONTEXT = 4096


def small_decoder(architecture: str, seed: int = 0, **extra: Any) -> Any:
    """A random decoder in fp32."""
    model = ModelConfig(config={"model_type": architecture, **SIZES, **ARCHITECTURES.get(architecture, {}), **extra})
    return build_decoder(model, load_model_config(model, MAX_CONTEXT), seed)


def in_type(decoder: Any, dtype: torch.dtype) -> Any:
    """The decoder in `dtype`. In fp64 norms and routers too, which Transformers computes in fp32 whatever the type."""
    decoder = decoder.to(dtype).train()
    if dtype == torch.float64:
        for module in decoder.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = functools.partial(_exact_norm, module)
            if type(module).__name__.endswith("TopKRouter"):
                module.forward = functools.partial(_exact_router, module)
        # The other ways to multiply by experts know no fp64.
        decoder.config._experts_implementation = "eager"
    return decoder


def _exact_router(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logits = torch.nn.functional.linear(hidden.reshape(-1, module.hidden_dim), module.weight)
    weights, index = logits.softmax(-1).topk(module.top_k)
    if getattr(module, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, index


def _exact_norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    return module.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)


def sequence_tokens(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, SIZES["vocab_size"], length)


def labels_of(tokens: np.ndarray, masked: Sequence[int] = ()) -> np.ndarray:
    """Next tokens of a sequence; -100 at its end and wherever `masked` says the label must not count."""
    labels = np.append(tokens[1:], -100)
    labels[list(masked)] = -100
    return labels


def micro_batches(plan: StepPlan, rank: int, masked: dict[int, Sequence[int]]) -> tuple[TokenMicroBatch, ...]:
    """This rank's pieces of the sequences, whose tokens are seeded by their number."""
    result = []
    for rows in plan.micro_batch_rows(rank):
        columns: list[list[np.ndarray]] = [[], [], []]
        for row in rows:
            sequence = int(plan.pieces.sequence[row])
            tokens = sequence_tokens(int(plan.lengths[sequence]), sequence)
            degree, index = int(plan.pieces.cp_degree[row]), int(plan.pieces.cp_index[row])
            begin, end = (int(bound[0]) for bound in plan.chunk_bounds(np.array([row])))
            positions = begin + piece_positions(end - begin, degree, index)
            for column, values in zip(
                columns, (tokens, labels_of(tokens, masked.get(sequence, ())), np.arange(len(tokens))), strict=True
            ):
                column.append(values[positions])
        result.append(TokenMicroBatch(*(np.concatenate(column) for column in columns)))
    return tuple(result)


def world_of(
    ranks: Ranks,
    timeout_s: float = 60.0,
    pp_size: int = 1,
    wrap: Wrap | None = None,
    tp_size: int = 1,
    shard_size: int | None = None,
) -> World:
    """The pool's ranks as the trainer sees them, as stages of pipelines or TP ranks if asked."""
    parallel = ParallelConfig(pp_size=pp_size, tp_size=tp_size, shard_size=shard_size)
    return join_groups(ranks.rank, ranks.size, parallel, torch.device("cpu"), timeout_s, ranks.maker(), wrap)


def step_data(plan: StepPlan, rank: int, masked: dict[int, Sequence[int]] | None = None, step: int = 1) -> StepData:
    masked = masked or {}
    num_targets = np.array([n - 1 - len(masked.get(i, ())) for i, n in enumerate(plan.lengths)])
    batch = GlobalBatch(np.arange(plan.num_sequences), plan.lengths, num_targets)
    return StepData(step, batch, rank_share(plan, rank), micro_batches(plan, rank, masked), 0.0, 0.0, None)


def train_step(
    ranks: Ranks,
    plan: StepPlan,
    *,
    architecture: str = "llama",
    dtype: torch.dtype = torch.float32,
    master: torch.dtype = torch.float32,
    checkpointing: bool = False,
    masked: dict[int, Sequence[int]] | None = None,
    wrap: Wrap | None = None,
    tp_size: int = 1,
    **extra: Any,
) -> tuple[float, dict[str, torch.Tensor], StepResult]:
    """(loss mean, whole gradients of this stage, result) of one step on `plan`, from the model that seed 0 gives."""
    decoder = in_type(small_decoder(architecture, **extra), master)
    return step_of(ranks, plan, decoder, dtype, checkpointing=checkpointing, masked=masked, wrap=wrap, tp_size=tp_size)


def step_of(
    ranks: Ranks,
    plan: StepPlan,
    decoder: Any,
    dtype: torch.dtype = torch.float32,
    *,
    checkpointing: bool = False,
    masked: dict[int, Sequence[int]] | None = None,
    wrap: Wrap | None = None,
    tp_size: int = 1,
) -> tuple[float, dict[str, torch.Tensor], StepResult]:
    """The same for a whole decoder, which is cut and sharded."""
    world = world_of(ranks, pp_size=plan.pp_size, wrap=wrap, tp_size=tp_size)
    stages = even_stages(decoder, plan.pp_size)
    model = stage_model(decoder, stages, world.stage)
    if checkpointing:
        recompute_layers(model.decoder)
    shard_model(model, world, dtype)
    data = step_data(plan, world.hdp_rank, masked)
    result = run_step(model, CpuKernel(), world, data)
    loss = float(world.all_gather_numbers([result.loss_sum]).sum()) / data.batch.total_targets
    return loss, whole_gradients(model), result


def whole_gradients(model: LossModel) -> dict[str, torch.Tensor]:
    """Whole gradients by their names in the whole model; those of a tied head on its own stage keep the head's."""
    head = model.copied_weight()
    names = {f"decoder.{n}": n if p is head else model.whole_name(n) for n, p in model.decoder.named_parameters()}
    return {f"decoder.{names[name]}": gradient.clone() for name, gradient in full_gradients(model).items()}


def whole_weights(model: LossModel) -> dict[str, torch.Tensor]:
    """Whole weights by their names in the whole model; a collective."""
    shapes = flat_shapes(model.decoder)
    return {
        model.whole_name(name): whole_tensor(p.detach(), shapes.get(name)).clone()
        for name, p in model.decoder.named_parameters()
    }


def even_stages(decoder: Any, pp_size: int) -> list[range]:
    """The layers of `decoder` in `pp_size` runs of nearly equal length."""
    parts = np.array_split(np.arange(decoder.config.num_hidden_layers), pp_size)
    return layer_ranges([len(part) for part in parts])


def reference_step(
    plan: StepPlan,
    *,
    architecture: str = "llama",
    master: torch.dtype = torch.float64,
    masked: dict[int, Sequence[int]] | None = None,
    **extra: Any,
) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, gradients) of plain Hugging Face in one process: each sequence by itself, plain attention and head."""
    return reference_of(plan, in_type(small_decoder(architecture, **extra), master), masked)


def reference_of(
    plan: StepPlan, decoder: Any, masked: dict[int, Sequence[int]] | None = None
) -> tuple[float, dict[str, torch.Tensor]]:
    """The same for a decoder."""
    decoder.set_attn_implementation("sdpa")
    masked = masked or {}
    total, num_targets = torch.zeros((), dtype=next(decoder.parameters()).dtype), 0
    for i, length in enumerate(plan.lengths.tolist()):
        tokens = sequence_tokens(length, i)
        labels = torch.from_numpy(labels_of(tokens, masked.get(i, ())))
        logits = decoder(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        num_targets += int((labels >= 0).sum())
    (total / num_targets).backward()
    gradients = {f"decoder.{name}": p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    return float(total.detach()) / num_targets, gradients
