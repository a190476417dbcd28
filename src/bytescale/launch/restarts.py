"""Starts a run of local ranks again after a failure that the next attempt may be spared.

A rank that was killed, that lost its peers or that came upon a defect is worth another attempt; bad input, a full disk
and training that diverged are not: they would end the same way. The attempt's number travels in the variable that
torchrun sets for the same purpose, by which ranks go on from the run's own newest checkpoint.
"""

import sys
from collections.abc import Callable

from bytescale.launch.failure import RankFailure, describe
from bytescale.report.output import say

_WORTH_ANOTHER = ("signal", "peer", "exception")
ATTEMPT_VARIABLE = "TORCHELASTIC_RESTART_COUNT"


def run_with_restarts(
    attempt: Callable[[int, int], RankFailure | None],
    nproc: int,
    restarts: int,
    next_nproc: Callable[[int, int], int],
) -> RankFailure | None:
    """Run `attempt(nproc, number)` until it ends well, or with a failure that no other attempt would be spared.

    Args:
        attempt: one attempt with a number of ranks; numbers count from 0.
        nproc: ranks of the first one.
        restarts: most attempts after the first one.
        next_nproc: ranks of the attempt of that number, from those of the attempt before.

    Returns:
        None, or the last failure.

    Raises:
        Interrupted: a signal ended the run; there is no other attempt.
    """
    for number in range(restarts + 1):
        failure = attempt(nproc, number)
        if failure is None or failure.kind not in _WORTH_ANOTHER or number == restarts:
            break
        nproc = next_nproc(nproc, number + 1)
        ranks = f"{nproc} rank{'s' * (nproc != 1)}"
        if failure.traceback:
            say(failure.traceback.rstrip(), sys.stderr)
        say(f"bytescale: {describe(failure)}; restart {number + 1} of {restarts}, on {ranks}", sys.stderr)
    return failure
