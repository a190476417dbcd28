"""Ranks of a command: local ones started, and how a failure of theirs or of this process is shown."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from bytescale.config.schema import Config
from bytescale.launch import RankFailure, complaint, describe, launch, rendezvous, torchrun
from bytescale.report.output import say


def run_ranks(
    nproc: int, main: Callable[[], int | None], config: Config, environment: Mapping[str, str] | None = None
) -> RankFailure | None:
    """Run `main` as `nproc` ranks that meet on this machine; torch has been imported.

    Args:
        nproc: number of ranks.
        main: what a rank does.
        config: the run.
        environment: added to that of the ranks.

    Returns:
        None, or the failure that ended them.
    """
    with rendezvous() as meeting:
        return launch(
            nproc,
            main,
            run_dir=Path(config.run.dir),
            environment={**meeting, **(environment or {})},
            stop_patience_s=config.run.comm_timeout_s,
        )


def show_failure(failure: RankFailure | None) -> int:
    """The exit code of a command whose ranks ended with `failure`; says what it was."""
    if failure is None:
        return 0
    if failure.traceback:
        say(failure.traceback.rstrip(), sys.stderr)
    say(f"bytescale: {describe(failure)}", sys.stderr)
    return 2 if failure.kind == "user" else 1


def fail(error: Exception) -> int:
    """Say what went wrong and return the exit code of this process; a rank of torchrun ends here, from any thread."""
    found = complaint(error)
    torchrun.leave_error(found)
    if found.traceback:
        say(found.traceback.rstrip(), sys.stderr)
    else:
        rank = os.environ.get("RANK", "0")
        whose = "" if rank == "0" or found.kind == "peer" else f"rank {rank}: "
        say(f"bytescale: {whose}{found.message}", sys.stderr)
    return end_rank(found.exit_code)


def end_rank(code: int) -> int:
    """End a rank of torchrun with `code` at once; elsewhere return it.

    A failed rank must not linger in threads or destructors that wait for its peers. Nor must one that is done: a thread
    of the process groups that lets go of a tensor while the interpreter is being taken down aborts the process.
    """
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
