"""Tensor parallelism beside rings and pipelines against one process: loss, every gradient, and what is refused."""

from typing import Any

import pytest
import torch

from bytescale.errors import UserError
from bytescale.plan.step_plan import StepPlan
from bytescale.runtime.grid import Grid
from bytescale.runtime.tensor_parallel.probe import probe_split
from tests.plans import drawn
from tests.ranks import RankPool, Ranks
from tests.runtime.models import ARCHITECTURES, reference_step, small_decoder, train_step

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
    check(ranks, ALONE, 4, architecture, 1e-5, num_key_value_heads=4)


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
