"""Local ranks of a command: started, and their failure shown."""

import sys
from collections.abc import Callable
from pathlib import Path

from bytescale.config.schema import Config
from bytescale.launch import RankFailure, describe, launch, rendezvous
from bytescale.report.output import say


def run_ranks(nproc: int, main: Callable[[], int | None], config: Config) -> RankFailure | None:
    """Run `main` as `nproc` ranks that meet on this machine; torch has been imported.

    Returns:
        None, or the failure that ended them.
    """
    with rendezvous() as environment:
        return launch(
            nproc,
            main,
            run_dir=Path(config.run.dir),
            environment=environment,
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
