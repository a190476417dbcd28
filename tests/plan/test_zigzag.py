"""The zig-zag piece rule: coverage, size and balance for any length and degree."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.plan.zigzag import piece_positions, piece_runs, piece_tokens

LENGTHS = st.integers(0, 3000)
DEGREES = st.integers(1, 70)


@given(LENGTHS, DEGREES)
def test_pieces_cover_every_token_exactly_once(length: int, degree: int) -> None:
    positions = np.concatenate([piece_positions(length, degree, k) for k in range(degree)])
    assert np.array_equal(np.sort(positions), np.arange(length))


@given(LENGTHS, DEGREES)
def test_no_piece_exceeds_its_share_and_runs_agree_with_counts(length: int, degree: int) -> None:
    for k in range(degree):
        runs = piece_runs(length, degree, k)
        assert 0 <= runs.front_begin <= runs.front_end <= runs.back_begin <= runs.back_end <= length
        assert runs.num_tokens == piece_tokens(length, degree, k) == len(piece_positions(length, degree, k))
        assert abs(runs.num_front_tokens - runs.num_back_tokens) <= 1
        assert runs.num_tokens <= -(-length // degree)


@given(st.integers(1, 5000), st.integers(1, 16))
def test_causal_work_is_balanced(length: int, degree: int) -> None:
    work = np.array([(piece_positions(length, degree, k) + 1).sum() for k in range(degree)])
    # A piece differs from the mean by less than a row of the mask for each of its two cuts.
    assert np.abs(work - work.mean()).max() <= 2 * length
    if length >= 1000 * degree:
        assert work.max() <= work.mean() * (1 + 2 * degree / length)


@given(st.lists(st.tuples(LENGTHS, DEGREES, st.integers(0, 69)), min_size=1))
def test_counts_work_on_arrays(rows: list[tuple[int, int, int]]) -> None:
    length, degree, index = np.array([(s, d, k % d) for s, d, k in rows]).T
    expected = [piece_tokens(int(s), int(d), int(k)) for s, d, k in zip(length, degree, index, strict=True)]
    assert piece_tokens(length, degree, index).tolist() == expected


@pytest.mark.parametrize(
    ("length", "degree", "expected"),
    [
        (8, 2, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        (7, 1, [[0, 1, 2, 3, 4, 5, 6]]),
        (1, 3, [[], [], [0]]),
        (5, 3, [[4], [0, 3], [1, 2]]),
    ],
)
def test_known_placements(length: int, degree: int, expected: list[list[int]]) -> None:
    assert [piece_positions(length, degree, k).tolist() for k in range(degree)] == expected
