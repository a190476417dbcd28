"""A rank's share of a plan holds what the plan says, and every piece of the sequences it serves."""

import numpy as np

from bytescale.plan.share import rank_share
from tests.plans import drawn


def test_the_share_of_every_rank_is_the_plan() -> None:
    plan = drawn("40 61 90 20", "0 | 1[0/2] | 2[0/3]", "1[1/2] | 2[1/3] 3", "2[2/3]", "")
    seen: list[int] = []
    for rank in range(plan.hdp_size):
        share = rank_share(plan, rank)
        assert len(share) == plan.num_micro_batches()[rank]
        for number, part in enumerate(share):
            assert part.number == number and (plan.pieces.micro_batch[part.rows] == number).all()
            assert (plan.pieces.rank[part.rows] == rank).all()
            assert part.num_tokens == plan.pieces.tokens[part.rows].sum()
            assert part.cp_degree == plan.pieces.cp_degree[part.rows].max()  # type: ignore[index]
            for sequence, rows in zip(part.sequences, part.sequence_rows, strict=True):
                np.testing.assert_array_equal(np.sort(rows), np.flatnonzero(plan.pieces.sequence == sequence))
            seen += part.rows.tolist()
    assert sorted(seen) == list(range(len(plan.pieces)))
    assert len(rank_share(plan, 3)) == 0
