"""Local ranks through torch's elastic launcher, and one clear error when one of them fails.

Parent: `launch` starts N processes, waits, and returns nothing or the one `RankFailure` to show. The first rank that
fails ends the run: torch's agent polls ten times a second and terminates the others. Which failure is the cause is
decided by kind, since peers of a dead rank fail within milliseconds of it: a signal first, then bad input, then a run
that cannot go on, then any other exception, and a lost peer only when there is nothing else.

Child: `report_to_launcher` leaves kind, message and traceback in the error file that the agent provides, so that N
ranks with one complaint print it once. A rank that merely lost a peer waits a moment before it ends, for the cause to
be seen first. Children die with the parent, also when that is killed.

Environment variables are those of torchrun, and OMP_NUM_THREADS for the children: cores divided by ranks unless the
user says otherwise.
"""

import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bytescale.errors import CommunicationError, RunError, UserError
from bytescale.files import write_text_atomically

Kind = Literal["signal", "user", "run", "exception", "peer"]
_RUN_ID_PREFIX = "bytescale-local-"
_PEER_GRACE_S = 2.0
_PRIORITY: tuple[Kind, ...] = ("signal", "user", "run", "exception", "peer")
_AGENT_PATIENCE_S = 20.0
"""Torch's agent kills what its SIGTERM has not ended after half a minute, such as a stopped process."""


@dataclass(frozen=True)
class RankFailure:
    """Why a run ended.

    Attributes:
        rank: the rank at fault.
        pid: its process.
        kind: `signal` (killed), `user` (bad input), `run` (disk full, diverged), `exception`, or `peer` (lost another
            rank).
        exit_code: negative for a signal, as in `subprocess`.
        message: one line, empty when the rank left none.
        traceback: of an unexpected exception; else empty.
        last_step: last step in the run's metrics; None before the first.
    """

    rank: int
    pid: int
    kind: Kind
    exit_code: int
    message: str = ""
    traceback: str = ""
    last_step: int | None = None


def describe(failure: RankFailure) -> str:
    """`failure` as one line. A `UserError` or `RunError` speaks for itself; all else names rank, pid and last step."""
    if failure.kind in ("user", "run"):
        return failure.message
    when = "before the first step" if failure.last_step is None else f"after step {failure.last_step}"
    if failure.kind == "signal":
        what = f"was killed by {_signal_name(-failure.exit_code)} {when}"
    else:
        what = f"failed with exit code {failure.exit_code} {when}"
    return f"rank {failure.rank} (pid {failure.pid}) {what}" + (f": {failure.message}" if failure.message else "")


def launch(
    nproc: int, command: Sequence[str], *, run_dir: Path, compute_threads: int | None = None
) -> RankFailure | None:
    """Run `python *command` as ranks 0..nproc-1 on this machine until all end or one fails.

    Args:
        nproc: number of ranks.
        command: arguments of the Python interpreter, e.g. ["-m", "bytescale", "train", "run.toml"].
        run_dir: where the ranks write `metrics.jsonl`, to name the last step.
        compute_threads: OpenMP threads of a rank; None divides the cores.

    Returns:
        None when every rank ended with 0, else the failure that caused the end.

    Raises:
        KeyboardInterrupt: Ctrl-C; the ranks have ended.
        SystemExit: another signal ended this process's ranks; the code is 128 + signal.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence_elastic_logs()
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="bytescale-") as log_dir, _children_environment(nproc, compute_threads):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=f"{_RUN_ID_PREFIX}{os.getpid()}",
            role="rank",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            rdzv_configs={"is_host": True},
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=log_dir),
            shutdown_timeout=10,
            # Not SIGINT: the agent would hand it on, and a rank that is still importing answers it with a traceback.
            signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
        )
        try:
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            return _root_cause(error.failures, _last_step(run_dir, started))
        except SignalException as error:
            raise SystemExit(128 + int(error.sigval)) from None
    return None


def is_launched_rank() -> bool:
    """Whether this process is a rank that `launch` started."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(_RUN_ID_PREFIX)


def prepare_launched_rank() -> None:
    """First act of a rank below `launch`: show stacks on a crash, and end when the launcher does.

    Ctrl-C reaches ranks through the launcher and ends them at once, also those that wait inside a library. When the
    launcher itself is killed, the kernel ends its ranks; that needs Linux.
    """
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def report_to_launcher(error: Exception) -> bool:
    """Leave `error` for the process that started this rank.

    Returns:
        True when our own launcher will show it, so that this rank stays silent.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return False
    kind, message, trace = _classify(error)
    record = {"message": message, "timestamp": int(time.time()), "kind": kind, "traceback": trace}
    try:
        # The agent may end this rank at any moment, and cannot read half a file.
        write_text_atomically(Path(path), json.dumps(record))
    except OSError:
        return False
    if kind == "peer":
        time.sleep(_PEER_GRACE_S)
    return is_launched_rank()


def _classify(error: Exception) -> tuple[Kind, str, str]:
    message = " ".join(str(error).split())
    if isinstance(error, UserError):
        return "user", message, ""
    if isinstance(error, RunError):
        return "run", message, ""
    if isinstance(error, CommunicationError):
        return "peer", message, ""
    trace = "".join(traceback.format_exception(error))
    return "exception", f"{type(error).__name__}: {message}" if message else type(error).__name__, trace


def _root_cause(failures: dict[int, Any], last_step: int | None) -> RankFailure:
    """The failure that caused the others. `failures` is torch's, in the order in which its agent met them."""
    found: list[RankFailure] = []
    for rank, failure in failures.items():
        record = failure.error_file_data
        if found and "kind" not in record and _ended_by_agent(failure, next(iter(failures.values()))):
            continue
        killed = failure.exitcode < 0 and "kind" not in record
        found.append(
            RankFailure(
                rank=rank,
                pid=failure.pid,
                kind="signal" if killed else record.get("kind", "user" if failure.exitcode == 2 else "exception"),
                exit_code=failure.exitcode,
                message=record["message"] if "kind" in record else "",
                traceback=record.get("traceback", ""),
                last_step=last_step,
            )
        )
    return min(found, key=lambda failure: _PRIORITY.index(failure.kind))


def _ended_by_agent(failure: Any, first: Any) -> bool:
    """Whether torch's agent, which met `first`, then ended this rank: with SIGTERM, and later with SIGKILL."""
    if failure.exitcode == -signal.SIGKILL:
        return bool(failure.timestamp - first.timestamp >= _AGENT_PATIENCE_S)
    return bool(failure.exitcode == -signal.SIGTERM)


def _last_step(run_dir: Path, started: float) -> int | None:
    """The last step of this run's metrics; None when there is none or the file is older than the run."""
    path = run_dir / "metrics.jsonl"
    try:
        if path.stat().st_mtime < started:
            return None
        lines = path.read_text(encoding="utf-8").splitlines()
        return int(json.loads(lines[-1])["step"]) if lines else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def _children_environment(nproc: int, compute_threads: int | None) -> Iterator[None]:
    """Set what the ranks inherit, and put back what the agent changes in this process."""
    before = dict(os.environ)
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if compute_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(compute_threads)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _silence_elastic_logs() -> None:
    """Torch's agent logs every signal it sends; we report the one that matters."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
