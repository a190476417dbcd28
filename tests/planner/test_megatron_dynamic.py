"""`megatron-dynamic` against what the peer's own function gave, plan for plan, and where the peer aborts or pads.

`megatron_dynamic.json` holds, for 240 random batches, the micro-batches, the sum of all degrees and a digest of the
whole plan as Megatron-LM's development branch made it: the sets of every micro-batch in order of rank, each as its
size and its sequences.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from bytescale.cost import preset_cost
from bytescale.errors import UserError
from bytescale.plan.validate import validate
from bytescale.planner import plan
from bytescale.planner.strategies.megatron_dynamic import plan_micro_batches
from tests.planner.inputs import lognormal

TABLE = json.loads((Path(__file__).parent / "megatron_dynamic.json").read_text())


def sets(lengths: list[int], hdp_size: int, capacity: int = 8192) -> list[list[tuple[int, list[int]]]]:
    micro_batches = plan_micro_batches(np.array(lengths, dtype=np.int64), capacity, hdp_size)
    return [[(s.size, list(s.sequences)) for s in rank_sets] for rank_sets in micro_batches]


def test_plan_for_plan_what_the_peer_makes() -> None:
    assert len(TABLE["batches"]) >= 200
    for hdp_size, capacity, num, mean, sigma, seed, *expected in TABLE["batches"]:
        lengths = lognormal(num, mean, seed=seed, sigma=sigma, low=1, high=min(131072, hdp_size * capacity))
        made = sets(lengths.tolist(), hdp_size, capacity)
        degrees = sum(size * len(members) for rank_sets in made for size, members in rank_sets)
        digest = hashlib.sha256(json.dumps(made, separators=(",", ":")).encode()).hexdigest()[:12]
        assert [len(made), degrees, digest] == expected, (hdp_size, capacity, num, mean, sigma, seed)


def test_short_sequences_share_a_set_that_the_longest_dwarfs() -> None:
    assert sets([16384, 8192, 4096, 512], 4) == [[(2, [0]), (1, [1]), (1, [2, 3])]]


def test_a_sequence_takes_more_ranks_than_it_needs_where_that_raises_the_largest_work_less() -> None:
    # 8,000^2 on one rank outdoes 9,000^2 / 2, so it takes two; the last finds no rank free and joins the lighter set.
    assert sets([9000, 8000, 700], 4) == [[(2, [0]), (2, [1, 2])]]


@pytest.mark.parametrize("hdp_size", [3, 6, 7, 12, 24])
@pytest.mark.parametrize("pp_size", [1, 4])
def test_ranks_that_are_no_power_of_two(hdp_size: int, pp_size: int) -> None:
    for lengths in ([hdp_size * 8000, 1000, 1000], lognormal(50, 4000, high=hdp_size * 8192)):
        validate(
            plan(
                lengths,
                "megatron-dynamic",
                hdp_size=hdp_size,
                tokens_per_rank=8192,
                cost=preset_cost(),
                pp_size=pp_size,
            )
        )


@pytest.mark.parametrize("pp_size", [1, 2])
def test_whole_tokens_never_exceed_the_capacity(pp_size: int) -> None:
    # By the peer's fractions 400 sequences of one token fill no more than 50 tokens of each of 8 ranks.
    step = plan(400 * [1], "megatron-dynamic", hdp_size=8, tokens_per_rank=50, cost=preset_cost(), pp_size=pp_size)
    assert validate(step).peak_tokens <= 50


def test_too_long_is_named() -> None:
    with pytest.raises(UserError, match=r"sequence 0 has 65537 tokens .* hold 65536"):
        plan([65537, 100], "megatron-dynamic", hdp_size=8, tokens_per_rank=8192, cost=preset_cost())
