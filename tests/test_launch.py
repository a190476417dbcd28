"""The local launcher: one error for every way a rank can fail, and no process left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest

from bytescale.errors import CommunicationError, Interrupted, RunError, UserError
from bytescale.launch import RankFailure, complaint, describe, launch, run_apart, shared_threads, torchrun
from bytescale.launch.failure import failure_of, root_cause
from bytescale.launch.signals import recorded

pytestmark = pytest.mark.timeout(60)

WATCHDOG = "[rank1]:[E802 ProcessGroupNCCL.cpp:685] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(..."


def defect() -> NoReturn:
    raise ZeroDivisionError("by nothing")


def stand_in(directory: Path, behaviour: str, others: str) -> Callable[[], int | None]:
    """What ranks do in place of training: `behaviour` is rank 1's; the others notice a lost peer at once, or hang."""

    def rank_main() -> int | None:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        (directory / f"pid{rank}").write_text(str(os.getpid()))
        while len(list(directory.glob("pid*"))) < world_size:
            time.sleep(0.01)
        if rank == 0:
            steps = (json.dumps({"step": step}) for step in (1, 7))
            (directory / "metrics.jsonl").write_text("\n".join(steps) + "\n")
        if behaviour == "ok":
            return None
        if behaviour == "all-user":
            raise UserError("the same for all")
        if rank != 1 and others == "notice":
            raise CommunicationError(f"rank {rank} waited for rank 1")
        if rank != 1 or behaviour == "hang":
            time.sleep(600)
        time.sleep(0.2)
        return misbehave(behaviour)

    return rank_main


def misbehave(behaviour: str) -> int:
    if behaviour == "user":
        raise UserError("line 3 of x.txt is broken")
    if behaviour == "run":
        raise RunError("cannot write x: No space left on device")
    if behaviour == "full":
        raise OSError(28, "No space left on device", "/x/y")
    if behaviour == "raise":
        defect()
    if behaviour == "exit":
        os._exit(3)
    if behaviour == "return":
        return 3
    if behaviour == "watchdog":
        os.write(2, WATCHDOG.encode() + b"\n")
        os.kill(os.getpid(), signal.SIGABRT)
    os.kill(os.getpid(), int(behaviour))
    time.sleep(600)
    return 0


def start(directory: Path, behaviour: str, others: str = "notice", nproc: int = 3) -> RankFailure | None:
    return launch(nproc, stand_in(directory, behaviour, others), run_dir=directory)


def alive(directory: Path) -> list[int]:
    """Ranks that still run."""
    return [pid for path in directory.glob("pid*") if _state(pid := int(path.read_text() or 0)) != "Z"]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return "Z"


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def test_success_leaves_nothing_behind(tmp_path: Path) -> None:
    environment, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    descriptors = os.listdir("/proc/self/fd")
    assert start(tmp_path, "ok", nproc=2) is None
    assert dict(os.environ) == environment
    assert signal.getsignal(signal.SIGTERM) == handler
    assert os.listdir("/proc/self/fd") == descriptors


@pytest.mark.parametrize(
    ("behaviour", "kind", "exit_code", "words"),
    [
        ("user", "user", 2, "line 3 of x.txt is broken"),
        ("all-user", "user", 2, "the same for all"),
        ("run", "run", 1, "cannot write x: No space left on device"),
        ("full", "run", 1, "cannot write /x/y: No space left on device"),
        ("raise", "exception", 1, "failed with exit code 1 after step 7: ZeroDivisionError: by nothing"),
        ("exit", "exception", 3, "failed with exit code 3 after step 7"),
        ("return", "exception", 3, "failed with exit code 3 after step 7"),
        (str(int(signal.SIGKILL)), "signal", -9, "was killed by SIGKILL after step 7"),
        (str(int(signal.SIGTERM)), "signal", -15, "was killed by SIGTERM after step 7"),
        (str(int(signal.SIGABRT)), "signal", -6, "was killed by SIGABRT after step 7"),
    ],
)
@pytest.mark.parametrize("others", ["notice", "hang"])
def test_the_cause_is_found_whoever_ends_first(
    tmp_path: Path,
    behaviour: str,
    kind: str,
    exit_code: int,
    words: str,
    others: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    failure = start(tmp_path, behaviour, others)
    assert failure is not None
    assert (failure.kind, failure.exit_code) == (kind, exit_code)
    assert words in describe(failure)
    if behaviour != "all-user":
        assert failure.rank == 1
    assert ("defect()" in failure.traceback) == (behaviour == "raise")
    assert alive(tmp_path) == []
    printed = capfd.readouterr()
    assert printed.out == "" and "Traceback" not in printed.err


def test_lost_peers_alone_are_reported(tmp_path: Path) -> None:
    failure = start(tmp_path, "hang", "notice")
    assert failure is not None and failure.kind == "peer"
    assert "failed with exit code 1 after step 7: rank" in describe(failure)
    assert "waited for rank 1" in describe(failure)


def test_a_rank_that_its_watchdog_aborts_has_lost_a_peer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    failure = start(tmp_path, "watchdog", "hang")
    assert failure is not None and (failure.kind, failure.exit_code, failure.rank) == ("peer", -signal.SIGABRT, 1)
    assert "was killed by SIGABRT after step 7: " in describe(failure)
    assert "Watchdog caught collective operation timeout" in describe(failure)
    assert WATCHDOG in capfd.readouterr().err, "what a rank says is passed on"


@pytest.mark.parametrize(
    ("kind", "exit_code", "report"),
    [
        ("exception", 1, complaint(ValueError("x")).to_json()),
        ("user", 2, complaint(UserError("x")).to_json()),
        ("signal", -9, ""),
        ("signal", -11, ""),
        ("exception", 1, '{"kind": "us'),
    ],
)
def test_a_watchdog_hides_no_cause(kind: str, exit_code: int, report: str) -> None:
    aborted = failure_of(0, 100, -signal.SIGABRT, b"", WATCHDOG)
    own = failure_of(1, 101, exit_code, report.encode(), "")
    lost = failure_of(2, 102, 1, complaint(CommunicationError("y")).to_json().encode(), "")
    assert own.kind == kind
    assert root_cause([aborted, own, lost]) == root_cause([lost, aborted, own]) == own
    # A crash of its own is one, whatever else the rank wrote.
    assert failure_of(0, 100, -signal.SIGABRT, b"", "double free or corruption").kind == "signal"
    assert failure_of(0, 100, -signal.SIGSEGV, b"", WATCHDOG).kind == "signal"


def test_a_stopped_rank_is_ended_with_the_others_and_is_not_the_cause(tmp_path: Path) -> None:
    failure = start(tmp_path, str(int(signal.SIGSTOP)), "notice")
    assert failure is not None and failure.kind == "peer" and failure.rank in (0, 2)
    assert alive(tmp_path) == []


def test_what_a_rank_started_ends_with_it(tmp_path: Path) -> None:
    def rank_main() -> int:
        child = subprocess.Popen(["sleep", "600"])
        (tmp_path / "pid9").write_text(str(child.pid))
        return 3

    failure = launch(1, rank_main, run_dir=tmp_path)
    assert failure is not None and failure.exit_code == 3
    wait_until(lambda: alive(tmp_path) == [])


def test_metrics_of_an_earlier_run_do_not_count(tmp_path: Path) -> None:
    old = tmp_path / "metrics.jsonl"
    old.write_text('{"step": 99}\n')
    os.utime(old, (1, 1))
    failure = launch(2, lambda: 3, run_dir=tmp_path)
    assert failure is not None and describe(failure).endswith("failed with exit code 3 before the first step")


def test_ranks_have_no_input_and_the_variables_of_torchrun(tmp_path: Path) -> None:
    def rank_main() -> None:
        assert os.read(0, 1) == b""
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MORE")
        (tmp_path / os.environ["RANK"]).write_text(" ".join(os.environ[name] for name in names))

    assert launch(2, rank_main, run_dir=tmp_path, environment={"MORE": "x"}) is None
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["0 0 2 2 x", "1 1 2 2 x"]


def test_a_check_fails_apart() -> None:
    def refuse() -> None:
        raise UserError("no such\nfile")

    assert run_apart(lambda: None) is None
    failure = run_apart(refuse)
    assert failure is not None and (failure.kind, failure.rank, describe(failure)) == ("user", None, "no such file")
    failure = run_apart(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert failure is not None and describe(failure).startswith("the check of the run (pid ")


DRIVER = """
import sys
from pathlib import Path
from tests import test_launch
from bytescale.errors import Interrupted
from bytescale.launch import interruptible
try:
    with interruptible():
        failure = test_launch.start(Path(sys.argv[1]), "hang", "hang", 2)
        sys.exit(test_launch.describe(failure))
except Interrupted as error:
    print(error, file=sys.stderr)
    sys.exit(128 + error.signal_number)
"""


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`driver(ignored)` starts a launcher of two ranks that hang, below signals that its own starter ignores."""
    started: list[subprocess.Popen[str]] = []

    def begin(*ignored: signal.Signals) -> subprocess.Popen[str]:
        def dispositions() -> None:
            for number in (signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path)],
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=dispositions,
            start_new_session=True,
        )
        started.append(process)
        wait_until(lambda: (tmp_path / "metrics.jsonl").exists() and len(alive(tmp_path)) == 2)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (signal.SIGTERM, 143, "ended by SIGTERM after step 7\n"),
        (signal.SIGINT, 130, "ended by SIGINT after step 7\n"),
        (signal.SIGHUP, 129, "ended by SIGHUP after step 7\n"),
        (signal.SIGKILL, -signal.SIGKILL, ""),
    ],
)
def test_ranks_end_with_the_launcher(
    tmp_path: Path, driver: Callable[..., subprocess.Popen[str]], number: signal.Signals, code: int, words: str
) -> None:
    # A job in the background of a shell inherits an ignored SIGINT; this one does not.
    process = driver()
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (code, words)
    wait_until(lambda: alive(tmp_path) == [])


@pytest.mark.parametrize("ignored", [signal.SIGHUP, signal.SIGINT])
def test_what_was_ignored_at_the_start_stays_ignored(
    tmp_path: Path, driver: Callable[..., subprocess.Popen[str]], ignored: signal.Signals
) -> None:
    """A shell sends SIGHUP to all of a job at logout, and `nohup` is there to survive it."""
    process = driver(ignored)
    os.killpg(process.pid, ignored)
    for pid in alive(tmp_path):
        os.kill(pid, ignored)
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=0.5)
    assert process.poll() is None and len(alive(tmp_path)) == 2
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (143, "ended by SIGTERM after step 7\n")


def stopping_main(directory: Path, *, heeds: bool, seconds: float = 0.3) -> Callable[[], int | None]:
    """A rank that notes signals and, if it `heeds` them, ends with 128 + the first; the later the higher its rank."""

    def rank_main() -> int | None:
        with recorded() as received:
            (directory / f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
            while not (received and heeds):
                time.sleep(0.01)
            time.sleep(seconds * (1 + int(os.environ["RANK"])))
        (directory / f"got{os.environ['RANK']}").write_text(repr(received))
        return 128 + received[0]

    return rank_main


def when_all_are_there(directory: Path, *numbers: signal.Signals) -> int:
    """Fork a helper that sends `numbers` to this process, one after the other, once two ranks run."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        wait_until(lambda: len(alive(directory)) == 2)
        for number in numbers:
            time.sleep(0.2)
            os.kill(parent, number)
        os._exit(0)
    return pid


def test_a_signal_is_passed_on_once_and_the_ranks_take_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bytescale.launch.ranks.CAUSE_PATIENCE_S", 0.1)
    helper = when_all_are_there(tmp_path, signal.SIGTERM)
    with pytest.raises(Interrupted) as caught:
        launch(2, stopping_main(tmp_path, heeds=True), run_dir=tmp_path)
    os.waitpid(helper, 0)
    # The ranks ended in good order and said so themselves.
    assert (caught.value.signal_number, str(caught.value)) == (signal.SIGTERM, "")
    assert [(tmp_path / f"got{rank}").read_text() for rank in (0, 1)] == [f"[{int(signal.SIGTERM)}]"] * 2


@pytest.mark.parametrize(("numbers", "patience_s"), [((signal.SIGINT, signal.SIGINT), 600.0), ((signal.SIGINT,), 0.5)])
def test_a_second_signal_or_the_end_of_patience_ends_at_once(
    tmp_path: Path, numbers: tuple[signal.Signals, ...], patience_s: float
) -> None:
    helper = when_all_are_there(tmp_path, *numbers)
    with pytest.raises(Interrupted, match="ended by SIGINT"):
        launch(2, stopping_main(tmp_path, heeds=False), run_dir=tmp_path, stop_patience_s=patience_s)
    os.waitpid(helper, 0)
    assert alive(tmp_path) == [] and not list(tmp_path.glob("got*"))


def test_threads_are_shared_unless_someone_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    with shared_threads(2, None):
        assert os.environ["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert dict(os.environ) == before
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for threads, expected in ((None, "1"), (3, "3")):
        with shared_threads(2, threads):
            assert os.environ["OMP_NUM_THREADS"] == expected


@pytest.mark.parametrize(
    ("variables", "nproc", "words"),
    [
        ({}, 0, "--nproc 0: at least 1 rank is needed"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
            2,
            "--nproc 2 starts ranks, but RANK = 0 and WORLD_SIZE = 1 are set, which says that this process is a rank: "
            "unset RANK and WORLD_SIZE, or use torchrun --nproc-per-node 2 -m bytescale train without --nproc",
        ),
        ({"WORLD_SIZE": "2"}, 2, "but WORLD_SIZE = 2 is set, which says"),
        ({"RANK": "0"}, None, "RANK = 0 is set, but not WORLD_SIZE and MASTER_ADDR and MASTER_PORT: start with"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None, "are set, but not MASTER_ADDR and MASTER_PORT: start with torchrun"),
        ({"RANK": "x", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, None, "RANK = x is not a number"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "p"}, None, "MASTER_PORT = p is not a"),
        ({"RANK": "3", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, None, "ranks count from 0 to 1"),
    ],
)
def test_variables_of_another_starter_are_named(variables: dict[str, str], nproc: int | None, words: str) -> None:
    with pytest.raises(UserError) as caught:
        torchrun.world_size(variables, nproc)
    assert words in str(caught.value) and len(str(caught.value)) < 3 * 120


def test_torchrun_says_the_size_of_the_world() -> None:
    assert torchrun.world_size({"MASTER_PORT": "1"}) is None
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert torchrun.world_size(variables) == 2


def test_below_torchrun_the_error_is_left_in_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torchrun.leave_error(complaint(ValueError("nobody reads this")))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    torchrun.leave_error(complaint(ValueError("x\ny")))
    assert '"message": "ValueError: x y"' in (tmp_path / "error.json").read_text()
    (tmp_path / "none").write_text("a file in the place of the directory")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "none" / "error.json"))
    torchrun.leave_error(complaint(ValueError("x")))
