"""One training step on several ranks against plain Hugging Face in one process: loss and every gradient."""

from typing import Any

import numpy as np
import pytest
import torch

from bytescale.cost import attention_bytes
from bytescale.plan.step_plan import StepPlan
from bytescale.runtime.device import TORCH_DTYPES
from tests.plans import drawn, placed
from tests.ranks import RankPool
from tests.runtime.models import ARCHITECTURES, SIZES, reference_step, train_step

# A micro-batch holding a slice of a long sequence and whole short ones; one that is the last on one rank and the first
# on another; counts 3, 2, 1, 0: the last rank is idle.
UNEQUAL = drawn("40 61 90 20 7 2", "0 | 1[0/2] | 2[0/3]", "1[1/2] 5 | 2[1/3] 3", "2[2/3] 4", "")
WIDE = drawn("101 64 5", "0[1/3] 1[0/2] | 2[0/3]", "0[2/3] | 2[1/3]", "0[0/3] 1[1/2] | 2[2/3]")


def check(plan: StepPlan, results: list[Any], reference: tuple[float, dict[str, torch.Tensor]], bound: float) -> None:
    loss, gradients = reference
    for ours_loss, ours, _ in results:
        assert abs(ours_loss - loss) <= bound * abs(loss)
        assert set(ours) == set(gradients)
        for name, gradient in gradients.items():
            error = (ours[name].double() - gradient).abs().max()
            assert error <= bound * gradient.abs().max().clamp_min(1e-12), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_in_fp32(ranks: RankPool, architecture: str) -> None:
    for plan in (UNEQUAL, WIDE):
        results = ranks.run(plan.hdp_size, _step, plan, architecture, {})
        check(plan, results, reference_of(plan, architecture), 1e-5)


def reference_of(plan: StepPlan, architecture: str) -> Any:
    """In fp64 where that is possible: the experts of Mixtral multiply in fp32, Gemma 3 has norms of its own form."""
    exact = architecture in ("llama", "qwen3", "mistral")
    return reference_step(plan, architecture=architecture, master=torch.float64 if exact else torch.float32)


def _step(ranks: Any, plan: StepPlan, architecture: str, options: dict[str, Any]) -> Any:
    return train_step(ranks, plan, architecture=architecture, **options)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_fp64_is_exact(ranks: RankPool, tied: bool, checkpointing: bool) -> None:
    extra = {"tie_word_embeddings": tied}
    options = {"dtype": torch.float64, "master": torch.float64, "checkpointing": checkpointing, **extra}
    results = ranks.run(4, _step, UNEQUAL, "llama", options)
    check(UNEQUAL, results, reference_step(UNEQUAL, **extra), 1e-12)


def test_bf16_compute_with_fp32_states(ranks: RankPool) -> None:
    loss, gradients = reference_step(UNEQUAL)
    single = ranks.run(1, _step, drawn("40 61 90 20 7 2", "0 | 1 | 2 | 3 | 4 | 5"), "llama", _BF16)[0]
    for ours_loss, ours, _ in ranks.run(4, _step, UNEQUAL, "llama", _BF16):
        assert abs(ours_loss - loss) <= 2e-3 * loss
        for name, gradient in gradients.items():
            assert ours[name].dtype == torch.float32
            error, bound = ((x[name].double() - gradient).norm() for x in (ours, single[1]))
            assert error <= 2 * bound, name


_BF16 = {"dtype": TORCH_DTYPES["bfloat16"]}


@pytest.mark.parametrize(
    ("lengths", "masked"),
    [
        # All targets of one rank's piece ignored; exactly one target in the batch; 3 targets beside 300.
        ([256, 40], {0: list(range(64))}),
        ([512], {0: [i for i in range(511) if i != 300]}),
        ([4, 301], {}),
        ([10, 20, 30, 40], {}),
    ],
)
def test_targets_are_counted_once_over_all_ranks(ranks: RankPool, lengths: list[int], masked: dict) -> None:
    reference = reference_step(placed(lengths, [[(0, i)] for i in range(len(lengths))], 1), masked=masked)
    for degree in (1, 2, 4):
        placement = [[((i + k) % 4, 0) for k in range(degree)] for i in range(len(lengths))]
        plan = placed(lengths, placement, 4)
        check(plan, ranks.run(4, _step, plan, "llama", {"masked": masked}), reference, 1e-5)


def test_two_micro_batches_add_up(ranks: RankPool) -> None:
    together = drawn("64 64", "0[0/2] 1[0/2]", "0[1/2] 1[1/2]")
    apart = drawn("64 64", "0[0/2] | 1[0/2]", "0[1/2] | 1[1/2]")
    reference = reference_step(together)
    for plan in (together, apart):
        check(plan, ranks.run(2, _step, plan, "llama", {}), reference, 1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_sent_bytes_are_those_of_the_traffic_model(ranks: RankPool, checkpointing: bool) -> None:
    kv_bytes = 2 * SIZES["num_key_value_heads"] * (SIZES["hidden_size"] // SIZES["num_attention_heads"]) * 4
    tiny = drawn(
        "1 3 7", "0[0/4] 1[0/4] 2[0/4]", "0[1/4] 1[1/4] 2[1/4]", "0[2/4] 1[2/4] 2[2/4]", "0[3/4] 1[3/4] 2[3/4]"
    )
    for plan in (UNEQUAL, WIDE, tiny):
        results = ranks.run(plan.hdp_size, _step, plan, "llama", {"checkpointing": checkpointing})
        sent = sum(result.bytes_sent for _, _, result in results)
        assert sent == attention_bytes(plan, kv_bytes, SIZES["num_hidden_layers"], checkpointing)


def test_a_rank_without_work_has_the_same_gradients(ranks: RankPool) -> None:
    plan = drawn("30", "", "0", "")
    check(plan, ranks.run(3, _step, plan, "mixtral", {}), reference_of(plan, "mixtral"), 1e-5)
    assert np.array_equal(plan.num_micro_batches(), [0, 1, 0])
