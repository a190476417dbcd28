"""Tensor parallelism beside rings and pipelines against one process: loss, every gradient, and what is refused."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from bytescale.config.schema import TrainConfig
from bytescale.cost import ModelShape
from bytescale.cost.traffic import tensor_bytes
from bytescale.errors import UserError
from bytescale.plan.step_plan import StepPlan
from bytescale.runtime.attention.context import AttentionContext
from bytescale.runtime.attention.kernels import CpuKernel
from bytescale.runtime.attention.work import local_work
from bytescale.runtime.fsdp import clip_gradients, gather, gradient_norm, shard_model
from bytescale.runtime.grid import Grid
from bytescale.runtime.model.decoder import LossModel
from bytescale.runtime.model.stages import stage_model
from bytescale.runtime.sharded import local_tensor
from bytescale.runtime.tensor_parallel.probe import probe_split
from bytescale.train.optimizer import make_optimizer
from bytescale.train.step import run_step
from tests.plans import drawn, placed, valid_plans
from tests.ranks import RankPool, Ranks
from tests.runtime.models import (
    ARCHITECTURES,
    even_stages,
    in_type,
    reference_step,
    small_decoder,
    step_data,
    train_step,
    whole_weights,
    world_of,
)

# Unequal counts, a ring beside whole sequences, lengths that no number of TP ranks divides.
TWO = drawn("61 40 9 30", "0[0/2] 2 | 3", "0[1/2] 1")
THREE = drawn("61 40 9 33 5", "0[0/3] | 1[0/2] 2 | 4", "0[1/3] | 1[1/2]", "0[2/3] 3")
ALONE = drawn("41 30 1", "0 2 | 1")
IDLE = drawn("37 12", "0 | 1", "")
EXACT = {"dtype": torch.float64, "master": torch.float64}


def _step(ranks: Ranks, plan: StepPlan, architecture: str, tp_size: int, options: dict[str, Any]) -> Any:
    loss, gradients, result = train_step(ranks, plan, architecture=architecture, tp_size=tp_size, **options)
    return loss, gradients, result.bytes_sent


def check(ranks: RankPool, plan: StepPlan, tp_size: int, architecture: str, bound: float, **extra: Any) -> None:
    """Every rank's loss and whole gradients are those of plain Hugging Face in one process."""
    exact = bound < 1e-9
    size = plan.hdp_size * plan.pp_size * tp_size
    loss, gradients = reference_step(
        plan, architecture=architecture, master=torch.float64 if exact else torch.float32, **_model(extra)
    )
    seen = set()
    for found_loss, found, _ in ranks.run(size, _step, plan, architecture, tp_size, extra | (EXACT if exact else {})):
        assert abs(found_loss - loss) <= bound * loss
        for name, gradient in found.items():
            whole = name if name in gradients else name.replace("lm_head.weight", "model.embed_tokens.weight")
            seen.add(whole)
            error = (gradient.double() - gradients[whole]).abs().max()
            assert error <= bound * gradients[whole].abs().max().clamp_min(1e-12), (whole, float(error))
    assert seen == set(gradients)


def _model(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != "checkpointing"}


@pytest.mark.parametrize(
    ("plan", "tp_size", "extra"),
    [
        (TWO, 2, {}),
        (TWO, 2, {"tie_word_embeddings": True, "checkpointing": True}),
        (IDLE, 2, {"pad_token_id": 60}),
        (THREE, 2, {}),
        (ALONE, 4, {"num_key_value_heads": 4}),
        (ALONE, 2, {"attention_bias": True, "mlp_bias": True}),
    ],
    ids=["2x2", "2x2-tied", "2x2-idle", "3x2", "1x4", "1x2-biases"],
)
def test_llama_equals_one_process(ranks: RankPool, plan: StepPlan, tp_size: int, extra: dict[str, Any]) -> None:
    check(ranks, plan, tp_size, "llama", 1e-12, **extra)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "mistral"])
def test_other_architectures_in_fp32(ranks: RankPool, architecture: str) -> None:
    check(ranks, TWO, 2, architecture, 1e-5)


def test_bf16_compute_with_fp32_states(ranks: RankPool) -> None:
    """No gradient is further from the exact one than twice what one rank in bf16 is."""
    loss, exact = reference_step(TWO)
    alone = placed(TWO.lengths.tolist(), [[(0, i)] for i in range(TWO.num_sequences)], 1)
    half = {"dtype": torch.bfloat16}
    _, single, _ = ranks.run(1, _step, alone, "llama", 1, half)[0]
    for found_loss, found, _ in ranks.run(4, _step, TWO, "llama", 2, half):
        assert abs(found_loss - loss) <= 2e-3 * loss
        for name, gradient in exact.items():
            error, bound = ((x[name].double() - gradient).norm() for x in (found, single))
            assert found[name].dtype == torch.float32 and error <= 2 * bound, name


def test_norms_of_queries_and_keys_in_several_micro_batches(ranks: RankPool) -> None:
    check(ranks, ALONE, 2, "qwen3", 1e-12)
    check(ranks, drawn("21 13 8", "0 | 1 | 2"), 2, "qwen3", 1e-12)


PIPELINES = drawn("40 61 90 20", "0 | 1[0/2] | 2 3", "1[1/2]", pp_size=2)


@pytest.mark.parametrize("tied", [False, True])
def test_pipelines_equal_one_process(ranks: RankPool, tied: bool) -> None:
    check(ranks, PIPELINES, 2, "llama", 1e-12, num_hidden_layers=4, tie_word_embeddings=tied)


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_experts_are_spread_over_the_ranks(ranks: RankPool, architecture: str) -> None:
    check(ranks, TWO, 2, architecture, 1e-5)
    check(ranks, TWO, 2, architecture, 1e-12, checkpointing=True)
    check(ranks, ALONE, 4, architecture, 1e-12, num_key_value_heads=4)
    # Three tokens on four experts: most ranks have one without a token.
    check(ranks, drawn("3", "0", ""), 2, architecture, 1e-5)


def _train(
    ranks: Ranks, plan: StepPlan, architecture: str, tp_size: int, extra: dict[str, Any], shard_size: int | None = None
) -> Any:
    """Losses and norms of five clipped AdamW steps in fp64, and the whole weights after them."""
    world = world_of(ranks, pp_size=plan.pp_size, tp_size=tp_size, shard_size=shard_size)
    decoder = in_type(small_decoder(architecture, **extra), torch.float64)
    model = stage_model(decoder, even_stages(decoder, plan.pp_size), world.stage)
    shard_model(model, world, torch.float64)
    optimizer = make_optimizer(model, TrainConfig(lr=1e-3))
    data, numbers = step_data(plan, world.hdp_rank), []
    for _ in range(5):
        loss_sum = run_step(model, CpuKernel(), world, data).loss_sum
        norm = gradient_norm(model, world, without=model.copied_weight())
        clip_gradients(model, norm, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        numbers += [float(world.all_gather_numbers([loss_sum]).sum()), norm]
    return numbers, whole_weights(model)


FOUR = drawn("61 40 9 30", "0[0/3]", "0[1/3] | 1[1/2]", "0[2/3] | 2", "1[0/2] | 3")


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "plan", "tp_size", "extra", "shard_size"),
    [
        ("llama", TWO, 2, {"attention_bias": True}, None),
        ("llama", PIPELINES, 2, {"tie_word_embeddings": True}, None),
        ("qwen3", THREE, 2, {"tie_word_embeddings": True}, None),
        ("llama", ALONE, 4, {"num_key_value_heads": 4}, None),
        ("qwen3", FOUR, 2, {}, 2),
    ],
    ids=["2x2", "2x2x2-tied", "3x2-tied", "1x4", "4x2-copies"],
)
def test_five_steps_are_those_of_one_rank(
    ranks: RankPool, architecture: str, plan: StepPlan, tp_size: int, extra: dict[str, Any], shard_size: int | None
) -> None:
    alone = placed(plan.lengths.tolist(), [[(0, i)] for i in range(plan.num_sequences)], 1)
    numbers, weights = ranks.run(1, _train, alone, architecture, 1, extra)[0]
    size = plan.hdp_size * plan.pp_size * tp_size
    for found, state in ranks.run(size, _train, plan, architecture, tp_size, extra, shard_size):
        assert found == pytest.approx(numbers, rel=1e-12)
        for name, weight in state.items():
            # AdamW divides gradients by themselves, so what is rounding in a gradient of 1e-10 is 1e-6 of a step.
            assert (weight - weights[name]).abs().max() <= 1e-8, name


def _loss(ranks: Ranks, plan: StepPlan, architecture: str, tp_size: int) -> float:
    return train_step(ranks, plan, architecture=architecture, tp_size=tp_size)[0]


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(plan=valid_plans(min_ranks=2, max_ranks=3, max_sequences=8), architecture=st.sampled_from(["qwen3", "mixtral"]))
@pytest.mark.timeout(300)
@pytest.mark.long
def test_random_plans_end_and_agree_with_one_rank(ranks: RankPool, plan: StepPlan, architecture: str) -> None:
    assume(int(plan.lengths.max()) > 1)
    alone = placed(plan.lengths.tolist(), [[(0, i)] for i in range(plan.num_sequences)], 1)
    loss = ranks.run(1, _loss, alone, architecture, 1, timeout_s=30)[0]
    size = 2 * plan.hdp_size
    assert ranks.run(size, _loss, plan, architecture, 2, timeout_s=30) == pytest.approx([loss] * size, rel=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("plan", [TWO, PIPELINES], ids=["2x2", "2x2x2"])
def test_collectives_send_what_the_traffic_model_says(ranks: RankPool, plan: StepPlan, checkpointing: bool) -> None:
    layers = 2 * plan.pp_size
    size = 2 * plan.hdp_size * plan.pp_size
    sent = ranks.run(size, _tensor_bytes, plan, {"checkpointing": checkpointing, "num_hidden_layers": layers})
    shape = ModelShape("small", layers, 32, 4, 2, 8, 64, 97, dtype_bytes=4)
    assert sum(sent) == tensor_bytes(plan, shape, 2, checkpointing)


def _tensor_bytes(ranks: Ranks, plan: StepPlan, options: dict[str, Any]) -> int:
    return train_step(ranks, plan, tp_size=2, **options)[2].tensor_bytes_sent


def _kept(ranks: Ranks, tp_size: int) -> int:
    """Bytes that the layers keep of one micro-batch for its backward."""
    world = world_of(ranks, tp_size=tp_size)
    model = LossModel(small_decoder("llama", num_hidden_layers=4, intermediate_size=96))
    shard_model(model, world, torch.float32)
    gather(model)
    own = {local_tensor(p).untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    ids_T = torch.arange(600) % 97
    context = AttentionContext(local_work([600]), CpuKernel(), world.comm)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden_RE = model.hidden_states(ids_T, torch.arange(600), context)
    assert len(hidden_RE) == 600 // tp_size
    return sum(storage.nbytes() for storage in storages.values())


def test_a_rank_keeps_its_share_of_the_activations(ranks: RankPool) -> None:
    (whole,) = ranks.run(1, _kept, 1)
    # Rotary tables are whole on every rank.
    assert max(ranks.run(2, _kept, 2)) <= 1.05 * whole / 2


def test_where_ranks_stand() -> None:
    grid = Grid.of_world(12, pp_size=2, tp_size=2)
    assert [grid.place(rank) for rank in (0, 1, 2, 5, 6, 11)] == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 2, 1), (1, 0, 0), (1, 2, 1),
    ]  # fmt: skip
    assert grid.hdp_lines().tolist() == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert grid.tp_lines().tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


@pytest.mark.parametrize("architecture", [*ARCHITECTURES])
@pytest.mark.parametrize("tp_size", [2, 4])
def test_threads_stand_for_ranks(architecture: str, tp_size: int) -> None:
    decoder = small_decoder(architecture, num_key_value_heads=4)
    names = {name: (id(p), p.shape) for name, p in decoder.named_parameters()}
    probe_split(decoder, 4096, tp_size)
    assert names == {name: (id(p), p.shape) for name, p in decoder.named_parameters()}


def test_what_a_split_model_would_get_wrong_is_refused() -> None:
    class Odd(torch.nn.Linear):
        """Something that sees all heads, which no plan tells."""

        def forward(self, x_1TE: torch.Tensor) -> torch.Tensor:
            return super().forward(x_1TE - x_1TE.mean(-1, keepdim=True))

    decoder = small_decoder("llama")
    decoder.model.layers[1].self_attn.o_proj.__class__ = Odd
    with pytest.raises(UserError, match="'llama' cannot be shared by TP ranks: together they give another result"):
        probe_split(decoder, 4096, 2)
    with pytest.raises(UserError, match="'llama' cannot be shared by TP ranks: their parts do not run"):
        probe_split(small_decoder("llama", num_key_value_heads=1), 4096, 2)
