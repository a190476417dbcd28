"""What is started again, how often, and on how many ranks."""

import pytest

from bytescale.launch import RankFailure, run_with_restarts


def failing(*kinds: str | None) -> tuple[list[tuple[int, int]], object]:
    """Attempts that end as said, one after the other; and the (ranks, number) of those that were made."""
    made: list[tuple[int, int]] = []

    def attempt(nproc: int, number: int) -> RankFailure | None:
        made.append((nproc, number))
        kind = kinds[number]
        return None if kind is None else RankFailure(0, 1, kind, 1, "words")  # type: ignore[arg-type]

    return made, attempt


@pytest.mark.parametrize(
    ("kinds", "restarts", "made", "end"),
    [
        ((None,), 3, 1, None),
        (("signal", None), 0, 1, "signal"),
        (("signal", "peer", "exception", None), 3, 4, None),
        (("signal", "peer", "exception", None), 2, 3, "exception"),
        (("user", None), 3, 1, "user"),
        (("signal", "run", None), 3, 2, "run"),
    ],
)
def test_only_what_may_end_otherwise_is_started_again(
    kinds: tuple[str | None, ...], restarts: int, made: int, end: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts, attempt = failing(*kinds)
    failure = run_with_restarts(attempt, 4, restarts, lambda nproc, number: nproc - 1)  # type: ignore[arg-type]
    assert attempts == [(4 - number, number) for number in range(made)]
    assert (failure.kind if failure is not None else None) == end
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == made - 1
    assert all(f"; restart {n} of {restarts}, on {4 - n} rank" in line for n, line in enumerate(lines, 1))
