"""One run of one strategy on one setting, through the command line, and what it measured.

The ranks are forked from this process, which has imported what they need, so that starting 16 hosts costs one import.
Until the first step begins hosts run at full speed; then each is held to its share.
"""

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster.hosts import Host, cluster
from benchmarks.cluster.settings import Setting, configuration, write_corpus
from bytescale.errors import RunError

_PORT = 29_511
_READY_PATIENCE_S = 600.0
NUM_UNSETTLED_STEPS = 1
"""First steps that are left out of means: files are cold, connections are made."""


@dataclass(frozen=True)
class Trial:
    """What one run measured, one entry a step where it is a tuple."""

    setting: str
    strategy: str
    repeat: int
    step_time_s: tuple[float, ...]
    imbalance: tuple[float, ...]
    loss: tuple[float, ...]
    plan_time_s: tuple[float, ...]
    predicted_s: tuple[float, ...]

    @property
    def mean_step_s(self) -> float:
        return statistics.fmean(self.step_time_s[NUM_UNSETTLED_STEPS:])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def trial(setting: Setting, strategy: str, repeat: int, steps: int, directory: Path) -> Trial:
    """Train `steps` steps on a fresh cluster.

    Raises:
        UserError: the machine cannot have the hosts.
        RunError: a host failed; says which and how.
    """
    corpus = directory / f"{setting.lengths}-{steps}.jsonl"
    if not corpus.exists():
        write_corpus(setting.lengths, steps, corpus)
    run_dir = directory / setting.name / f"{strategy}-{repeat}"
    train(setting, configuration(setting, strategy, corpus, run_dir, steps), run_dir)
    return _read(setting, strategy, repeat, run_dir)


def train(setting: Setting, configuration: str, run_dir: Path, memory_bytes: int | None = None) -> None:
    """Train `configuration` on a fresh cluster, each host with at most `memory_bytes`.

    Raises:
        UserError: the machine cannot have the hosts.
        RunError: a host failed; says which and how.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    config = run_dir.with_suffix(".toml")
    config.write_text(configuration)
    ready = run_dir / "processes.json"
    ready.unlink(missing_ok=True)
    import bytescale.train.trainer  # noqa: F401  # before the fork, for all hosts

    with cluster(setting.num_hosts, setting.link_rate, memory_bytes) as hosts:
        logs = [run_dir.with_suffix(f".{host.index}.log") for host in hosts]
        pids = [_start(host, hosts, config, log) for host, log in zip(hosts, logs, strict=True)]
        _hold(hosts, setting, pids, ready, logs)
        _wait(pids, logs)


def _start(host: Host, hosts: Sequence[Host], config: Path, log: Path) -> int:
    """Fork the one rank of a host."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        host.enter()
        os.environ |= {
            "RANK": str(host.index),
            "WORLD_SIZE": str(len(hosts)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": str(_PORT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": host.interface,
        }
        from bytescale.cli import main

        code = main(["train", str(config)])
    finally:
        sys.stdout.flush()
        os._exit(code)


def _hold(hosts: Sequence[Host], setting: Setting, pids: Sequence[int], ready: Path, logs: Sequence[Path]) -> None:
    """Give every host its share once training begins."""
    give_up_s = time.monotonic() + _READY_PATIENCE_S
    while not ready.exists():
        _fail_if_ended(pids, logs)
        if time.monotonic() > give_up_s:
            raise RunError(f"no step began within {_READY_PATIENCE_S:.0f} s; see {logs[0]}")
        time.sleep(0.1)
    for host in hosts:
        host.limit_cpu(setting.share_of(host.index))


def _fail_if_ended(pids: Sequence[int], logs: Sequence[Path]) -> None:
    for pid, log in zip(pids, logs, strict=True):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            _reap(pid, log)


def _wait(pids: Sequence[int], logs: Sequence[Path]) -> None:
    """Until all have ended; the first that fails ends the trial, whatever the others wait for."""
    running = dict(zip(pids, logs, strict=True))
    while running:
        for pid in list(running):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                _reap(pid, running.pop(pid))
        time.sleep(0.1)


def _reap(pid: int, log: Path) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code != 0:
        last = ""
        with contextlib.suppress(OSError, IndexError):
            last = log.read_text(errors="replace").strip().splitlines()[-1]
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        raise RunError(f"{log.name}: the host {how}: {last or 'no output'}")


def _read(setting: Setting, strategy: str, repeat: int, run_dir: Path) -> Trial:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]

    def column(name: str) -> tuple[float, ...]:
        return tuple(float(line.get(name) or 0.0) for line in lines)

    return Trial(
        setting.name,
        strategy,
        repeat,
        column("step_time_s"),
        column("imbalance"),
        column("loss"),
        column("plan_time_s"),
        column("predicted_step_s"),
    )
