"""What the planner says of lengths and seeds that are none."""

import numpy as np
import pytest

from bytescale.cost.presets import preset_cost
from bytescale.errors import UserError
from bytescale.planner import plan
from bytescale.planner.problem import check_lengths

COST = preset_cost("llama-7b", "h100")


def test_whole_numbers_in_any_column() -> None:
    assert check_lengths(np.array([16384, np.int32(7), 5.0], dtype=object)).tolist() == [16384, 7, 5]


@pytest.mark.parametrize(
    "lengths", [[512, 1024.0, "2048"], [5, 6, None], [5, 6, 10**30], [5, 6, [7]], [5, 6, 1.5, "x"]]
)
def test_the_entry_at_fault_is_named(lengths: list[object]) -> None:
    array = np.empty(len(lengths), dtype=object)
    array[:] = lengths
    with pytest.raises(UserError, match="sequence 2 is"):
        check_lengths(array)


@pytest.mark.parametrize("seed", [-1, 0.5, True])
def test_a_seed_is_a_whole_number_from_0(seed: object) -> None:
    with pytest.raises(UserError, match=f"seed is {seed}; it must be an integer of at least 0"):
        plan([5, 7], "best", hdp_size=2, tokens_per_rank=100, cost=COST, seed=seed)
