"""The local launcher: one error for every way a rank can fail, and no process left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from bytescale.launch import RankFailure, _root_cause, describe, is_launched_rank, launch, report_to_launcher

pytestmark = pytest.mark.timeout(60)

RANKS = '''
"""A stand-in for training: `behaviour` is what rank 1 does; the others notice a lost peer at once, or hang."""
import json, os, signal, sys, time
from pathlib import Path
from bytescale.errors import CommunicationError, RunError, UserError
from bytescale.launch import prepare_launched_rank, report_to_launcher

behaviour, others, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
prepare_launched_rank()
rank = int(os.environ["RANK"])
(directory / f"pid{rank}").write_text(str(os.getpid()))
(directory / f"threads{rank}").write_text(os.environ["OMP_NUM_THREADS"])

def fail(error, code):
    assert report_to_launcher(error)
    os._exit(code)

def defect():
    raise ZeroDivisionError("by nothing")

while len(list(directory.glob("pid*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
if rank == 0 and behaviour != "ok-before-steps":
    (directory / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\\n" + json.dumps({"step": 7}) + "\\n")
if behaviour == "ok":
    sys.exit(0)
if behaviour == "all-user":
    fail(UserError("the same for all"), 2)
if rank != 1 and others == "notice":
    time.sleep(0.2)
    fail(CommunicationError(f"rank {rank} waited for rank 1"), 1)
if rank != 1 or behaviour == "hang":
    time.sleep(600)
time.sleep(0.2)
if behaviour == "user":
    time.sleep(0.3)
    fail(UserError("line 3 of x.txt is broken"), 2)
if behaviour == "run":
    fail(RunError("cannot write x: No space left on device"), 1)
if behaviour == "raise":
    time.sleep(0.3)
    try:
        defect()
    except ZeroDivisionError as error:
        fail(error, 1)
if behaviour == "exit":
    os._exit(3)
os.kill(os.getpid(), int(behaviour))
time.sleep(600)
'''


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "ranks.py"
    path.write_text(RANKS)
    return path


def start(script: Path, behaviour: str, others: str = "notice", nproc: int = 3) -> RankFailure | None:
    command = [str(script), behaviour, others, str(script.parent)]
    return launch(nproc, command, run_dir=script.parent)


def alive(directory: Path) -> list[int]:
    """Ranks that still run."""
    pids = [int(path.read_text()) for path in directory.glob("pid*")]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists() and _state(pid) != "Z"]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return "Z"


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.05)


def test_success_leaves_nothing_behind(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environment, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    assert start(script, "ok", nproc=2) is None
    assert dict(os.environ) == environment
    assert signal.getsignal(signal.SIGTERM) == handler
    cores = len(os.sched_getaffinity(0))
    assert (script.parent / "threads1").read_text() == str(max(1, cores // 2))


@pytest.mark.parametrize(
    ("behaviour", "kind", "exit_code", "words"),
    [
        ("user", "user", 2, "line 3 of x.txt is broken"),
        ("all-user", "user", 2, "the same for all"),
        ("run", "run", 1, "cannot write x: No space left on device"),
        ("raise", "exception", 1, "failed with exit code 1 after step 7: ZeroDivisionError: by nothing"),
        ("exit", "exception", 3, "failed with exit code 3 after step 7"),
        (str(int(signal.SIGKILL)), "signal", -9, "was killed by SIGKILL after step 7"),
        (str(int(signal.SIGTERM)), "signal", -15, "was killed by SIGTERM after step 7"),
        (str(int(signal.SIGABRT)), "signal", -6, "was killed by SIGABRT after step 7"),
    ],
)
@pytest.mark.parametrize("others", ["notice", "hang"])
def test_the_cause_is_found_whoever_ends_first(
    script: Path, behaviour: str, kind: str, exit_code: int, words: str, others: str, capfd: pytest.CaptureFixture[str]
) -> None:
    begin = time.monotonic()
    failure = start(script, behaviour, others)
    assert time.monotonic() - begin < 25
    assert failure is not None
    assert (failure.kind, failure.exit_code) == (kind, exit_code)
    assert words in describe(failure)
    if behaviour != "all-user":
        assert failure.rank == 1
    assert ("defect()" in failure.traceback) == (behaviour == "raise")
    assert alive(script.parent) == []
    printed = capfd.readouterr()
    assert printed.out == "" and "elastic" not in printed.err and "Traceback" not in printed.err


def torch_failure(rank: int, exit_code: int, timestamp: int, **record: object) -> SimpleNamespace:
    return SimpleNamespace(pid=100 + rank, exitcode=exit_code, timestamp=timestamp, error_file_data=record)


def test_what_the_agent_ends_is_not_the_cause() -> None:
    """A stopped rank survives SIGTERM; half a minute after the others the agent kills it."""
    peers = {rank: torch_failure(rank, 1, 50, kind="peer", message=f"rank {rank} waited") for rank in (1, 3)}
    for number, seconds in ((signal.SIGTERM, 0), (signal.SIGKILL, 32)):
        cause = _root_cause(peers | {2: torch_failure(2, -number, 50 + seconds)}, 4)
        assert (cause.kind, cause.rank, cause.message) == ("peer", 1, "rank 1 waited")
    cause = _root_cause({1: peers[1], 2: torch_failure(2, -signal.SIGKILL, 52)}, 4)
    assert describe(cause) == "rank 2 (pid 102) was killed by SIGKILL after step 4"


def test_a_rank_that_cannot_leave_its_error_speaks_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "none" / "error.json"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "bytescale-local-1")
    (tmp_path / "none").write_text("a file in the place of the directory")
    assert not report_to_launcher(ValueError("x"))


def test_lost_peers_alone_are_reported(script: Path) -> None:
    failure = start(script, "hang", "notice")
    assert failure is not None and failure.kind == "peer"
    assert "failed with exit code 1 after step 7: rank" in describe(failure)
    assert "waited for rank 1" in describe(failure)


def test_metrics_of_an_earlier_run_do_not_count(script: Path) -> None:
    old = script.parent / "metrics.jsonl"
    old.write_text('{"step": 99}\n')
    os.utime(old, (1, 1))
    command = ["-c", "import os; os._exit(3)"]
    failure = launch(2, command, run_dir=script.parent)
    assert failure is not None and describe(failure).endswith("failed with exit code 3 before the first step")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_ranks_end_with_the_launcher(script: Path, number: signal.Signals, code: int) -> None:
    driver = (
        "import sys\nfrom pathlib import Path\nfrom bytescale.launch import launch\n"
        "try:\n    launch(2, sys.argv[1:], run_dir=Path(sys.argv[4]))\nexcept KeyboardInterrupt:\n    sys.exit(130)\n"
    )
    command = [sys.executable, "-c", driver, str(script), "hang", "hang", str(script.parent)]
    # A job in the background of a shell inherits an ignored SIGINT; this one must not.
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_until(lambda: len(alive(script.parent)) == 2 and (script.parent / "metrics.jsonl").exists(), 30)
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == code
        assert errors == ""
        wait_until(lambda: alive(script.parent) == [], 10)
    finally:
        process.kill()
        process.wait()


def test_compute_threads_win_over_the_environment(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [str(script), "ok", "notice", str(script.parent)]
    assert launch(1, command, run_dir=script.parent, compute_threads=3) is None
    assert (script.parent / "threads0").read_text() == "3"


def test_outside_a_launcher_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not is_launched_rank()
    assert not report_to_launcher(ValueError("x"))


def test_below_torchrun_the_error_file_is_written_but_the_rank_speaks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert not report_to_launcher(ValueError("x\ny"))
    assert '"message": "ValueError: x y"' in (tmp_path / "error.json").read_text()
