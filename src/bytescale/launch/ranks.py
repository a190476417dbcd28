"""Local ranks: forked from this process, so that they share its imports, and one clear error when one of them fails.

The first rank that fails ends the run. A failure that others cannot have caused ends them at once; after any other the
launcher waits a moment for its cause, see `bytescale.launch.failure`. A signal is passed on once, and the ranks end as
they are made to: after the step in hand, or at once while they start. A second one ends them at once.

Cost: a fork copies page tables only; four ranks of a loaded torch and Transformers start within a tenth of a second.
"""

import contextlib
import gc
import json
import math
import os
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bytescale.errors import Interrupted
from bytescale.launch.child import Child, start_child
from bytescale.launch.failure import RankFailure, after_step, failure_of, root_cause, signal_name
from bytescale.launch.signals import ending_signals, recorded

CAUSE_PATIENCE_S = 2.0
"""How long the cause of a failure that looks like a consequence may take to show."""

_CONCLUSIVE = ("signal", "user", "run")
"""Kinds that no other failure causes."""

_TICK_S = 0.1


def launch(
    nproc: int,
    main: Callable[[], int | None],
    *,
    run_dir: Path,
    environment: Mapping[str, str] | None = None,
    stop_patience_s: float = 600.0,
) -> RankFailure | None:
    """Run `main` as ranks 0..nproc-1 on this machine until all end or one fails.

    Args:
        nproc: number of ranks.
        main: what a rank does, told by the variables that torchrun sets; its result is the rank's exit code.
        run_dir: where the ranks write `metrics.jsonl`, to name the last step.
        environment: added to that of the ranks.
        stop_patience_s: how long ranks may take to end after a signal was passed on to them.

    Returns:
        None when every rank ended with 0, else the failure that caused the end.

    Raises:
        Interrupted: a signal ended the run; the ranks have ended.
    """
    started_s = time.time()
    environments = [
        {
            **(environment or {}),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
        }
        for rank in range(nproc)
    ]
    with recorded() as received, _children(main, list(enumerate(environments))) as children:
        _supervise(children, received, stop_patience_s)
    if all(child.exit_code == 0 for child in children):
        # They have come to their end, or a signal found all stored that a next run needs.
        return None
    last_step = _last_step(run_dir, started_s)
    _raise_interrupted(children, received, after_step(last_step))
    return _cause(children, last_step)


def run_apart(main: Callable[[], None], environment: Mapping[str, str] | None = None) -> RankFailure | None:
    """Run `main` in a child, so that what it leaves behind (threads, memory) is not inherited by ranks.

    Args:
        main: what the child does.
        environment: added to that of the child.

    Returns:
        None when it returned, else its failure, whose rank is None.

    Raises:
        Interrupted: a signal ended it.
    """
    with recorded() as received, _children(main, [(None, environment or {})]) as children:
        _supervise(children, received, stop_patience_s=0.0)
    _raise_interrupted(children, received, "before the ranks started")
    return _cause(children, None)


@contextlib.contextmanager
def shared_threads(nproc: int, compute_threads: int | None) -> Iterator[None]:
    """The environment in which torch must be imported before ranks are forked.

    OpenMP reads its number of threads when it is loaded: the cores divided by the ranks unless the user says otherwise.
    NVML counts devices without a CUDA context, which would not survive a fork.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    before = dict(os.environ)
    if compute_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(compute_threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _children(
    main: Callable[[], int | None], environments: Sequence[tuple[int | None, Mapping[str, str]]]
) -> Iterator[list[Child]]:
    """One child for each (rank, environment); all of them have ended after the block."""
    children: list[Child] = []
    # A collection in a child would touch, and so copy, every page that it shares with this process.
    gc.freeze()
    try:
        for rank, environment in environments:
            child = start_child(
                main, rank=rank, environment=environment, signals=ending_signals(), siblings=tuple(children)
            )
            children.append(child)
        yield children
    finally:
        gc.unfreeze()
        for child in children:
            child.kill()


def _supervise(children: Sequence[Child], received: list[int], stop_patience_s: float) -> None:
    """Wait until all children have ended, or until those that have not must be ended."""
    asked = False
    end_by_s = math.inf
    while running := [child for child in children if not child.reap()]:
        if received and not asked:
            asked, end_by_s = True, min(end_by_s, time.monotonic() + stop_patience_s)
            for child in running:
                child.send(received[0])
        failures = _failures(children)
        if failures:
            end_by_s = min(end_by_s, time.monotonic() + CAUSE_PATIENCE_S)
        conclusive = not asked and any(failure.kind in _CONCLUSIVE for failure in failures)
        if conclusive or len(received) > 1 or time.monotonic() >= end_by_s:
            return
        _pass_output(running)


def _pass_output(running: Sequence[Child]) -> None:
    """Pass on what arrives within a moment; the end of a child closes its pipes and so ends the wait."""
    ready, _, _ = select.select([fd for child in running for fd in child.pipes], [], [], _TICK_S)
    arrived = [child.take_output() for child in running]
    if ready and not any(arrived):
        # Pipes close a little before their process has ended.
        time.sleep(_TICK_S / 50)


def _raise_interrupted(children: Sequence[Child], received: Sequence[int], when: str) -> None:
    """Raise `Interrupted` if a signal ended the run; without a message if all ranks could end in good order."""
    stopped = [child.stopped_by for child in children if child.stopped_by]
    if received and not all(child.exit_code == 0 or child.stopped_by for child in children):
        raise Interrupted(received[0], f"ended by {signal_name(received[0])} {when}")
    if received or (stopped and not _failures(children)):
        raise Interrupted([*received, *stopped][0], "")


def _failures(children: Sequence[Child]) -> list[RankFailure]:
    """Of children that ended by themselves and not on request, or left a complaint before they were ended."""
    return [
        failure_of(child.rank, child.pid, child.exit_code, bytes(child.report), child.errors.decode(errors="replace"))
        for child in children
        if child.exit_code and (child.report or not (child.ended_by_us or child.stopped_by))
    ]


def _cause(children: Sequence[Child], last_step: int | None) -> RankFailure | None:
    failures = _failures(children)
    return replace(root_cause(failures), last_step=last_step) if failures else None


def _last_step(run_dir: Path, started_s: float) -> int | None:
    """The last step of this run's metrics; None without one or if the file is older than the run."""
    path = run_dir / "metrics.jsonl"
    try:
        if path.stat().st_mtime < started_s:
            return None
        lines = path.read_text(encoding="utf-8").splitlines()
        return int(json.loads(lines[-1])["step"]) if lines else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
