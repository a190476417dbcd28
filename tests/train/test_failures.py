"""Failures from outside, through the real command line: one line that says what, the right exit code, no rank left.

Every launch costs seconds, so checks that need no ranks run in one process; see also `tests/test_cli.py` for the
command line alone and `tests/test_launch.py` for the launcher alone.
"""

import ctypes
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from bytescale import cli
from bytescale.config.overrides import parse_overrides
from bytescale.config.toml import load_config
from bytescale.errors import RunError
from bytescale.report import read_summary
from bytescale.train.trainer import _memory_in_words as in_words
from bytescale.train.trainer import run
from tests.processes import CommandProcess
from tests.traces import check_trace
from tests.train.runs import environment, metrics, write_run

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]

AnyProcess = CommandProcess | subprocess.Popen[str]
ENDLESS = ("--train.steps", "100000", "--run.save_model", "false")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for_step(process: AnyProcess, run_dir: Path, step: int = 1) -> dict[int, int]:
    """Pids by rank, once `step` is in the metrics."""
    path = run_dir / "metrics.jsonl"
    while not path.is_file() or path.read_bytes().count(b"\n") < step:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    return {entry["rank"]: entry["pid"] for entry in json.loads((run_dir / "processes.json").read_text())}


def the_end(process: AnyProcess, code: int, pids: Iterable[int] = (), seconds: float = 30) -> list[str]:
    """The lines on standard error of a process that must end with `code` within `seconds`, and its ranks with it."""
    _, errors = process.communicate(timeout=seconds)
    assert process.returncode == code, errors
    assert not any(map(alive, pids))
    return errors.splitlines()


def begin_torchrun(nproc: int, arguments: Sequence[object]) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", nproc, "--master-port", free_port()]
    words += ["-m", "bytescale", "train", *arguments]
    return subprocess.Popen(
        list(map(str, words)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment()
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Opened:
    """How often a file is opened, by any process (inotify)."""

    OPEN, CLOSE = 0x20, 0x10

    def __init__(self, path: Path) -> None:
        libc = ctypes.CDLL(None)
        self._fd = libc.inotify_init1(os.O_NONBLOCK)
        # Closing is watched too: two equal events in a row would be reported as one.
        assert libc.inotify_add_watch(self._fd, os.fsencode(path), self.OPEN | self.CLOSE) > 0

    def count(self) -> int:
        with os.fdopen(self._fd, "rb") as file:
            events = file.read() or b""
        # int watch, unsigned mask, cookie and length of a name, which a file has none of.
        return sum(mask & self.OPEN != 0 for _, mask, _, _ in struct.iter_unpack("iIII", events))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line with which `bytescale train` refuses in this process."""
    assert cli.main(["train", *map(str, arguments)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("bytescale: "), lines
    return lines[0].removeprefix("bytescale: ")


def broken_files(directory: Path) -> dict[str, Path]:
    contents = {
        "empty": b"",
        "broken": b'{"text": "a"}\n{"text',
        "latin": b'{"text": "caf\xe9"}',
        "field": b'{"txt": ""}',
    }
    files = {name: directory / f"{name}.jsonl" for name in contents}
    for name, path in files.items():
        path.write_bytes(contents[name])
    return files


def test_bad_input_is_refused_before_any_rank_starts(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    files = broken_files(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text('{"version":')
    (tmp_path / "taken" / "metrics.jsonl").mkdir(parents=True)
    cases: list[tuple[list[Any], str]] = [
        (["--train.stpes", 3], "unknown key train.stpes; did you mean 'steps'?"),
        (["--nproc", 3, "--plan.tokens_per_rank", 100], "start 6 ranks, or raise tokens_per_rank to"),
        (["--nproc", 3, "--plan.strategy", "hdp-naiv"], "unknown plan.strategy 'hdp-naiv'; did you mean 'hdp-naive'?"),
        # Before any data is read, and before what else does not fit.
        (["--plan.strategy", "bst", "--plan.tokens_per_rank", 1], "unknown plan.strategy 'bst'; did you mean 'best'?"),
        (["--nproc", 4, "--parallel.hdp_size", 3], "= 3, but the world has 4 ranks: start 3 (--nproc 3) or change"),
        (["--nproc", 3, "--plan.strategy", "fcp"], 'the "blocks" layout, which can be planned but not trained'),
        (["--nproc", 3, "--parallel.pp_size", 3], "parallel.pp_size = 3 needs as many layers, the model has 2"),
        (["--nproc", 3, "--batch.tokens", 2**62], "can be planned at once"),
        (["--data.path", files["empty"]], "is empty"),
        (["--data.path", files["broken"]], "broken.jsonl:2 is not a line of JSON"),
        (["--data.path", files["latin"]], "latin.jsonl:1 is not a line of JSON: 'utf-8' codec"),
        (["--data.path", files["field"]], "set data.text_field (did you mean 'txt'?)"),
        (["--data.path", tmp_path / "none.jsonl"], "none.jsonl does not exist"),
        (["--data.path", tmp_path], "is a directory; give a file or a glob"),
        (["--data.tokenizer", path], "is not a valid tokenizer.json"),
        (["--model.config.vocab_size", 256], "its ids reach 256, the model has vocab_size 256"),
        (["--model.config.sliding_window", 100, "--model.config.model_type", "mistral"], "a sliding window of 100"),
        (["--model.config.hidden_size", 30], "multiple of the number of attention heads"),
        (["--model.path", tmp_path], "holds no config.json"),
        (["--nproc", 3, "--run.dir", config], "cannot be written: File exists"),
        (["--nproc", 3, "--run.dir", tmp_path / "taken"], "holds metrics.jsonl, which is a directory"),
    ]
    for arguments, words in cases:
        assert words in refusal(capsys, config, *arguments), arguments
    left = sorted(path.name for path in (tmp_path / "run").glob("*"))
    assert left == [], "a refused run wrote something"


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
)
def test_the_lack_of_memory_names_the_ways_out(error: Exception) -> None:
    with pytest.raises(RunError, match=r"rank 3 ran out of memory \(.+\); lower plan\.tokens_per_rank"), in_words(3):
        raise error


def test_a_killed_rank_ends_the_run(config: Path, tmp_path: Path, begin: Callable[..., CommandProcess]) -> None:
    process = begin(config, "--nproc", 3, *ENDLESS)
    pids = wait_for_step(process, tmp_path / "run", 2)
    os.kill(pids[1], signal.SIGKILL)
    (line,) = the_end(process, 1, pids.values())
    last = metrics(tmp_path / "run")[-1]["step"]
    assert line == f"bytescale: rank 1 (pid {pids[1]}) was killed by SIGKILL after step {last}"


@pytest.mark.parametrize(("axis", "hdp_size", "victim"), [("pp_size", 1, 1), ("pp_size", 2, 3), ("tp_size", 2, 2)])
def test_a_killed_rank_of_a_pipeline_or_a_tensor_group_ends_the_run(
    config: Path, tmp_path: Path, begin: Callable[..., CommandProcess], axis: str, hdp_size: int, victim: int
) -> None:
    options = ("--nproc", 2 * hdp_size, f"--parallel.{axis}", 2, "--plan.tokens_per_rank", 600 // hdp_size)
    process = begin(config, *options, *ENDLESS)
    pids = wait_for_step(process, tmp_path / "run", 2)
    os.kill(pids[victim], signal.SIGKILL)
    (line,) = the_end(process, 1, pids.values())
    last = metrics(tmp_path / "run")[-1]["step"]
    assert line == f"bytescale: rank {victim} (pid {pids[victim]}) was killed by SIGKILL after step {last}"


def test_a_rank_that_stops_answering_is_noticed(
    config: Path, tmp_path: Path, begin: Callable[..., CommandProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    process = begin(config, "--nproc", 2, "--run.comm_timeout_s", 10, *ENDLESS)
    pids = wait_for_step(process, tmp_path / "run")
    assert "is in use by another run" in refusal(capsys, config, "--nproc", 2)
    os.kill(pids[0], signal.SIGSTOP)
    (line,) = the_end(process, 1, pids.values())
    assert line.startswith(f"bytescale: rank 1 (pid {pids[1]}) failed with exit code 1 after step")
    assert "rank 1: " in line and "failed after " in line


def test_training_that_diverges_ends(config: Path, tmp_path: Path, begin: Callable[..., CommandProcess]) -> None:
    process = begin(config, "--nproc", 2, "--train.lr", "1e6", "--train.warmup_steps", 0)
    (line,) = the_end(process, 1, seconds=150)
    assert "training has diverged; lower train.lr" in line
    lines = metrics(tmp_path / "run")
    assert line.startswith(f"bytescale: step {len(lines)}: the ") and lines[-1]["grad_norm"] is None
    # What was reached before is kept.
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    assert {event["pid"] for event in check_trace((tmp_path / "run" / "trace.json").read_text())} == {0, 1}
    saved = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(bool(weight.isfinite().all()) for weight in saved.values())


def test_a_step_that_is_not_finite_can_be_left_out(config: Path, tmp_path: Path) -> None:
    words = ("--train.lr", "1e6", "--train.warmup_steps", "0", "--train.steps", "4", "--train.on_nonfinite", "skip")
    overrides, _ = parse_overrides((*words, "--plan.tokens_per_rank", "600"))
    assert run(load_config(config, overrides)) is None
    norms = [line["grad_norm"] for line in metrics(tmp_path / "run")]
    summary = read_summary(tmp_path / "run" / "summary.json")
    assert norms[0] is not None and norms[1:] == [None] * 3
    assert (summary.status, summary.num_nonfinite_steps) == ("finished", 3)
    assert any("its update was left out" in note for note in summary.notes)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_ends_on_request_with_all_that_it_reached(
    config: Path, tmp_path: Path, request: pytest.FixtureRequest, begin: Callable[..., AnyProcess], number: int
) -> None:
    """By Ctrl-C under our launcher, and as a scheduler ends torchrun, whose own exit code says nothing."""
    # A file that has just been written is read by every rank, since a further change could go unnoticed.
    corpus, an_hour_ago_s = tmp_path / "corpus.jsonl", time.time() - 3600
    os.utime(corpus, (an_hour_ago_s, an_hour_ago_s))
    opened, arguments = Opened(corpus), [config, "--train.steps", "100000"]
    if number == signal.SIGINT:
        process, code = begin(*arguments, "--nproc", 2), 130
    else:
        process, code = begin_torchrun(2, arguments), 1
        request.addfinalizer(process.kill)
    pids = wait_for_step(process, tmp_path / "run", 2)
    process.send_signal(number)
    the_end(process, code, pids.values(), seconds=60)
    # All ranks together have hashed the corpus once and tokenised it once.
    assert opened.count() == 2
    run_dir, lines = tmp_path / "run", metrics(tmp_path / "run")
    summary = read_summary(run_dir / "summary.json")
    assert (summary.status, summary.steps) == ("stopped", len(lines))
    assert any(note.startswith(f"stopped after step {len(lines)}; model saved in ") for note in summary.notes)
    assert load_file(run_dir / "model" / "model.safetensors")
    assert {"report.html", "trace.json"} <= {path.name for path in run_dir.iterdir()}
    # One story: the numbers of the closing table are those of the metrics.
    assert summary.targets == sum(line["tokens"] for line in lines)
    assert summary.comm_bytes == sum(line["comm_bytes"] for line in lines)
    assert summary.comm_bytes_static == sum(line["comm_bytes_static"] for line in lines)
    assert all(a["timestamp"] < b["timestamp"] for a, b in pairwise(lines))
    check_trace((run_dir / "trace.json").read_text())


def test_idle_ranks_and_odd_lengths(config: Path, tmp_path: Path, begin: Callable[..., CommandProcess]) -> None:
    arguments = ("--batch.sequences", 1, "--train.steps", 3, "--data.max_context", 67, "--plan.tokens_per_rank", 40)
    arguments += ("--plan.strategy", "hdp-naive")
    process = begin(config, "--nproc", 3, *arguments)
    assert the_end(process, 0, seconds=150) == []
    lines = metrics(tmp_path / "run")
    assert len(lines) == 3 and min(line["num_micro_batches_min"] for line in lines) == 0


def test_nodes_of_torchrun(config: Path, tmp_path: Path) -> None:
    """Two nodes on one machine: when a rank of one is killed, the other says what it waited for."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    arguments = [str(config), "--run.comm_timeout_s", "20", *ENDLESS]
    words = [[*torchrun, "--node-rank", n, "-m", "bytescale", "train", *arguments] for n in "01"]
    nodes = [
        subprocess.Popen(w, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment())
        for w in words
    ]
    try:
        pids = wait_for_step(nodes[0], tmp_path / "run")
        os.kill(pids[1], signal.SIGKILL)
        mine = [line for line in the_end(nodes[0], 1, pids.values()) if line.startswith("bytescale: ")]
        assert len(mine) == 1 and mine[0].startswith("bytescale: rank 0: "), mine
        assert "transfer from rank 1 failed" in mine[0] or "transfer to rank 1 failed" in mine[0] or "step" in mine[0]
        the_end(nodes[1], 1)
    finally:
        for node in nodes:
            node.kill()
            node.wait()
