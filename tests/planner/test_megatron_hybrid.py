"""`megatron-hybrid` against what the released peer does (megatron-core 0.19.2), and where the peer aborts."""

from typing import Any

import numpy as np
import pytest

from bytescale.cost import preset_cost
from bytescale.errors import UserError
from bytescale.plan.validate import validate
from bytescale.planner import plan
from bytescale.planner.strategies.megatron_hybrid import plan_rounds
from tests.planner.inputs import lognormal


def sets(lengths: list[int], hdp_size: int, capacity: int = 8192) -> list[list[tuple[int, list[int]]]]:
    rounds = plan_rounds(np.array(lengths, dtype=np.int64), capacity, hdp_size)
    return [[(s.size, [lengths[i] for i in s.sequences]) for s in rank_sets] for rank_sets in rounds]


def idle_share(rounds: list[list[tuple[int, list[int]]]], hdp_size: int) -> float:
    """By the peer's own cost, s^2 / D, with its barrier after each round."""
    work = longest = 0.0
    for rank_sets in rounds:
        loads = [(size, sum(s * s for s in members) / size) for size, members in rank_sets]
        work += sum(size * load for size, load in loads)
        longest += max(load for _, load in loads)
    return 1 - work / (hdp_size * longest)


def test_a_short_sequence_is_widened_over_all_ranks() -> None:
    assert sets([100], 8) == [[(8, [100])]]


def test_nine_full_sequences_need_a_second_round_on_all_ranks() -> None:
    assert sets(9 * [8192], 8) == [[(1, [8192])] * 8, [(8, [8192])]]


def test_mixed_lengths() -> None:
    assert sets([16384, 8192, 4096, 512], 4) == [[(2, [16384]), (1, [8192]), (1, [4096, 512])]]


# Ranks, sequences, mean -> rounds and idle share in per cent, as measured with the released wheel.
PUBLISHED = [
    (64, 512, 2048, 1, 44),
    (64, 512, 8192, 5, 26),
    (64, 4096, 2048, 5, 8.5),
    (64, 4096, 8192, 5, 1.2),
    (512, 512, 2048, 1, 93),
    (512, 512, 8192, 2, 82),
    (512, 4096, 2048, 1, 64),
    (512, 4096, 8192, 6, 24),
    (512, 16384, 2048, 3, 55),
    (512, 16384, 8192, 5, 3.5),
    (4096, 512, 2048, 1, 99),
    (4096, 512, 8192, 1, 98),
    (4096, 4096, 2048, 1, 95),
    (4096, 4096, 8192, 2, 81),
    (4096, 16384, 2048, 1, 92),
    (4096, 16384, 8192, 4, 44),
]


@pytest.mark.parametrize(("hdp_size", "num", "mean", "num_rounds", "idle"), PUBLISHED)
def test_published_rounds_and_idle_share(hdp_size: int, num: int, mean: int, num_rounds: int, idle: float) -> None:
    rounds = sets(lognormal(num, mean).tolist(), hdp_size)
    assert len(rounds) == num_rounds
    assert abs(100 * idle_share(rounds, hdp_size) - idle) <= 0.75


def test_512_sequences_on_4096_ranks_are_nearly_all_widened() -> None:
    lengths = lognormal(512, 2048).tolist()
    (rank_sets,) = sets(lengths, 4096)
    needs = [1 << max(0, (-(-members[0] // 8192) - 1).bit_length()) for _, members in rank_sets]
    assert sum(size > need for (size, _), need in zip(rank_sets, needs, strict=True)) == 511
    assert round(sum(lengths) / sum(size for size, _ in rank_sets)) in range(230, 260)


@pytest.mark.parametrize("hdp_size", [6, 12, 24])
def test_ranks_that_are_no_power_of_two(hdp_size: int) -> None:
    step = plan([40000, 1000, 1000], "megatron-hybrid", hdp_size=hdp_size, tokens_per_rank=8192, cost=preset_cost())
    validate(step)


@pytest.mark.parametrize("strategy", ["best", "static", "megatron-hybrid"])
@pytest.mark.parametrize(
    ("pp_size", "offload", "helps"), [(1, "off", True), (1, 1.0, False), (8, "off", True), (16, "off", False)]
)
def test_offloading_is_advised_only_where_something_may_leave(
    strategy: str, pp_size: int, offload: Any, helps: bool
) -> None:
    options: dict[str, Any] = {"hdp_size": 1, "tokens_per_rank": 100, "pp_size": pp_size, "offload": offload}
    with pytest.raises(UserError) as caught:
        plan([100_000], strategy, cost=preset_cost(), **options)
    message = str(caught.value)
    assert ("allow offload" in message) == helps
    assert "; 1 exists" in message and "use more ranks" in message


def test_too_long_is_named() -> None:
    with pytest.raises(UserError, match=r"sequence 0 has 65537 tokens .* hold 65536"):
        plan([65537, 100], "megatron-hybrid", hdp_size=8, tokens_per_rank=8192, cost=preset_cost())
