"""The cluster of the benchmarks: what it needs, and that nothing of it is left, however a measurement ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.cluster import hosts
from bytescale.errors import RunError, UserError

needs_hosts = pytest.mark.skipif(
    hosts.what_is_missing() is not None, reason=f"no hosts here: {hosts.what_is_missing()}"
)

_TRIAL = """
import sys, time
from pathlib import Path
from benchmarks.cluster import __main__, trial
from benchmarks.cluster.hosts import Host

directory = sys.argv[1]

def rank(host, hosts, config, log):
    import os
    pid = os.fork()
    if pid == 0:
        host.enter()
        Path(directory, f"{host.index}.pid").write_text(str(os.getpid()))
        if host.index == 0:
            Path(config).with_suffix("").joinpath("processes.json").write_text("")
        time.sleep(60)
        os._exit(0)
    return pid

trial._start = rank
sys.argv = ["cluster", "byted-8", "--strategies", "static", "--dir", directory]
sys.exit(__main__.main())
"""
"""The command with ranks that sleep, each leaving its pid."""


def test_without_root_one_line_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UserError, match="cannot make hosts here: it takes root"), hosts.cluster(1, "1gbit"):
        pass


def test_without_a_controller_one_line_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(hosts, "_GROUPS", tmp_path)
    with pytest.raises(UserError, match="no controller cpu"), hosts.cluster(1, "1gbit"):
        pass


def _left(pid: int) -> list[str]:
    return [p.name for place in hosts._places() if place.exists() for p in place.iterdir() if f"-{pid}-" in p.name]


@needs_hosts
def test_a_failed_set_up_leaves_nothing() -> None:
    with pytest.raises(RunError, match="tc "), hosts.cluster(2, "nonsense"):
        pass
    assert _left(os.getpid()) == []


@pytest.mark.long
@needs_hosts
@pytest.mark.parametrize("ending", ["a host is killed", "ctrl-C", "killed"])
def test_nothing_is_left_however_it_ends(ending: str, tmp_path: Path) -> None:
    command = subprocess.Popen([sys.executable, "-c", _TRIAL, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    ranks = [_pid(tmp_path / f"{i}.pid") for i in range(8)]
    if ending == "a host is killed":
        os.kill(ranks[5], signal.SIGKILL)
    else:
        command.send_signal(signal.SIGINT if ending == "ctrl-C" else signal.SIGKILL)
    errors = command.communicate(timeout=60)[1].strip()
    assert command.returncode == {"a host is killed": 1, "ctrl-C": 130, "killed": -signal.SIGKILL}[ending]
    assert len(errors.splitlines()) == (0 if ending == "killed" else 1), errors
    if ending == "a host is killed":
        assert "static-0.5.log: the host was ended by signal 9" in errors
    if ending == "killed":
        # Its ranks die with it; names are removed by whoever makes hosts next.
        hosts.remove_leftovers()
    assert _left(command.pid) == []
    assert not [pid for pid in ranks if _runs(pid)]


def _pid(file: Path) -> int:
    give_up_s = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
    return int(file.read_text())


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
