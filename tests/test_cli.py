"""The command line from outside: exit codes, one line per failure, and the contract between `train` and the trainer.

The trainer here is a stand-in (no torch), put in place by a `sitecustomize` that every rank inherits; the real one is
tested in `tests/train`.
"""

import importlib
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from bytescale import cli
from bytescale.config.schema import ParallelConfig
from bytescale.errors import CommunicationError, UserError

STAND_IN = """
import json, os, signal, sys, time, types
from pathlib import Path

def check(config, world_size):
    from bytescale.errors import UserError
    from bytescale.report.output import say
    say(f"check {world_size}")
    if config.data.text_field == "unsound":
        raise UserError("the data\\nis empty")

def preload(config):
    pass

def run(config, lost):
    from bytescale.errors import CommunicationError, UserError
    rank, what = int(os.environ.get("RANK", 0)), config.data.text_field
    directory = Path(config.run.dir)
    directory.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        line = {"step": 2, "loss": 1.5, "cp_degree_max": 1}
        (directory / "metrics.jsonl").write_text(json.dumps(line) + "\\n")
    (directory / f"rank{rank}").write_text(str(os.getpid()))
    if what == "text":
        from bytescale.report import RunSummary, write_summary
        if rank == 0:
            summary = RunSummary(2, 80, 4, 2.5, 1.5, 10.0, 1, 2, ((1, 4),), 0, 0, 8.0)
            write_summary(summary, directory / "summary.json")
        return
    if what == "user":
        raise UserError("sequence 3 does not fit")
    while len(list(directory.glob("rank*"))) < int(os.environ.get("WORLD_SIZE", 1)):
        time.sleep(0.01)
    if rank != 1:
        time.sleep(0.3)
        raise CommunicationError(f"rank {rank} waited for rank 1")
    if what == "crash":
        raise RuntimeError("a defect")
    if what == "full":
        raise OSError(28, "No space left on device", "/x/y")
    os.kill(os.getpid(), signal.SIGKILL)

trainer = types.ModuleType("bytescale.train.trainer")
trainer.check, trainer.preload, trainer.run = check, preload, run
sys.modules["bytescale.train.trainer"] = trainer
"""
CONFIG = """
[model]
preset = "llama-tiny"
[data]
source = "python-stdlib"
[batch]
tokens = 4096
"""
TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run("train", ...)` calls the command line in an empty directory with the stand-in trainer."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(STAND_IN)
    (tmp_path / "run.toml").write_text(CONFIG)
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    root = Path(__file__).parents[1] / "src"

    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "bytescale", *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{root}"} | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return call


def complaint(result: subprocess.CompletedProcess[str], code: int = 2) -> str:
    """The single line of a failed call."""
    assert result.returncode == code, result
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("bytescale: "), result.stderr
    return lines[0].removeprefix("bytescale: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("trian run.toml", "unknown command 'trian'; did you mean 'train'?"),
        ("--wrong", "No such option"),
        ("train", "one configuration file is needed, 0 are given"),
        ("train a.toml b.toml", "one configuration file is needed, 2 are given a.toml b.toml"),
        ("train none.toml", "cannot read configuration none.toml: No such file or directory"),
        ("train run.toml --nproc 0", "--nproc 0: at least 1 rank is needed"),
        ("train run.toml --nproc -2", "--nproc -2: at least 1 rank is needed"),
        ("train run.toml --nproc two", "'two' is not a valid integer"),
        ("train run.toml --nproc", "requires an argument"),
        ("train run.toml --nporc 2", "unknown option --nporc; did you mean '--nproc'?"),
        ("profile run.toml --max-lenght 2K", "unknown option --max-lenght; did you mean '--max-length'?"),
        ("profile run.toml --out .", "--out . is a directory; name a file in it, such as profile.json"),
        ("train run.toml --train.stpes 2", "unknown key train.stpes; did you mean 'steps'?"),
        ("train --train.steps 0 run.toml", "train.steps = 0; it must be at least 1"),
        ("train run.toml --nproc 4 --parallel.hdp_size 3", "pp_size * tp_size * hdp_size = 1 * 1 * 3 = 3, but the"),
        ("train run.toml --parallel.pp-size=2", "a world of 1 rank cannot be cut into pp_size * tp_size = 2 * 1"),
        ("report nowhere", "cannot read metrics nowhere/metrics.jsonl: No such file"),
        ("report", "Missing argument 'RUN_DIR'"),
    ],
)
def test_bad_input_is_one_line(
    run: Callable[..., subprocess.CompletedProcess[str]], arguments: str, words: str
) -> None:
    result = run(*arguments.split())
    assert words in complaint(result)
    assert result.stdout == ""


WITHOUT_TORCH = """
import sys
sys.modules |= dict.fromkeys(("torch", "transformers", "tokenizers", "pyarrow"))
from bytescale import cli
for words in sys.stdin.read().splitlines():
    code = cli.main(["train", "run.toml", "--nproc", "4", *words.split()])
    print(code, file=sys.stderr)
"""

MISTAKES = {
    "--train.stpes 2": "unknown key train.stpes; did you mean 'steps'?",
    "--train.steps x": 'train.steps must be an integer, not the string "x"',
    "--model.preset llama-tyni": "model.preset = 'llama-tyni' is unknown; did you mean 'llama-tiny'?",
    "--model.path nowhere": "model.path = {here}/nowhere holds no config.json",
    "--data.source jsonl --data.path none.jsonl": "data.path = {here}/none.jsonl does not exist",
    "--data.tokenizer none.json": '{here}/none.json" does not exist',
    "--plan.strategy bets": "unknown plan.strategy 'bets'; did you mean 'best'?",
    "--plan.profile none.json": "cannot read profile {here}/none.json",
    "--parallel.pp_size 3": "a world of 4 ranks cannot be cut into pp_size * tp_size = 3 * 1",
    "--run.dir used": "run.dir = {here}/used holds the results of an earlier run",
    "--run.dir run.toml": "cannot be written",
}


def test_quick_mistakes_are_answered_without_torch(run: Callable[..., object], tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "metrics.jsonl").write_text('{"step": 1}\n')
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], input="\n".join(MISTAKES), capture_output=True, text=True, cwd=tmp_path
    )
    lines = done.stderr.splitlines()
    assert lines[1::2] == ["2"] * len(MISTAKES), done.stderr
    for line, words in zip(lines[::2], MISTAKES.values(), strict=True):
        assert line.startswith("bytescale: ") and words.format(here=tmp_path) in line


def test_one_process(run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    result = run("train", "run.toml", "--run.dir", "out")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("check 1") == 1
    assert "loss first / last" in result.stdout and "2.5000 / 1.5000" in result.stdout
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("streams", ["closed pipe", "no streams"])
def test_a_run_goes_on_when_nobody_reads(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, nproc: int, streams: str
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = f"exec {sys.executable} -m bytescale train run.toml --nproc {nproc} --run.dir=out"
    words += " <&- >&- 2>&-" if streams == "no streams" else " 2>&1"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(["bash", "-c", words], stdout=writer, cwd=tmp_path, env=environment)
    os.close(writer)
    assert done.returncode == 0
    assert (tmp_path / "out" / "report.html").exists()


def test_local_ranks(run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    result = run("train", "run.toml", "--nproc", "3", "--run.dir=out")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.count("check") == 1 and "check 3" in result.stdout
    assert result.stdout.count("report: out/report.html") == 1
    assert sorted(path.name for path in (tmp_path / "out").glob("rank*")) == ["rank0", "rank1", "rank2"]


def test_checks_come_before_ranks(run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    result = run("train", "run.toml", "--nproc", "3", "--run.dir=out", "--data.text_field", "unsound")
    assert complaint(result) == "the data is empty"
    assert not list((tmp_path / "out").iterdir())


def test_the_same_complaint_of_all_ranks_is_one_line(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    result = run("train", "run.toml", "--nproc", "3", "--run.dir=out", "--data.text_field", "user")
    assert complaint(result) == "sequence 3 does not fit"


def test_a_killed_rank_is_named(run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    result = run("train", "run.toml", "--nproc", "3", "--run.dir=out", "--data.text_field", "kill")
    pid = (tmp_path / "out" / "rank1").read_text()
    assert complaint(result, 1) == f"rank 1 (pid {pid}) was killed by SIGKILL after step 2"


def test_a_full_disk_is_no_defect(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    result = run("train", "run.toml", "--nproc", "3", "--run.dir=out", "--data.text_field", "full")
    assert complaint(result, 1) == "cannot write /x/y: No space left on device"


@pytest.mark.parametrize(
    ("rank", "size", "words"),
    [
        ("x", "2", "RANK = x is not a number"),
        ("0", "two", "WORLD_SIZE = two is not a number"),
        ("-1", "2", "RANK = -1 is not a number"),
        ("2", "2", "RANK = 2 and WORLD_SIZE = 2 are set: ranks count from 0 to 1"),
    ],
)
def test_ranks_that_torchrun_would_not_give(
    run: Callable[..., subprocess.CompletedProcess[str]], rank: str, size: str, words: str
) -> None:
    assert words in complaint(run("train", "run.toml", **(TORCHRUN | {"RANK": rank, "WORLD_SIZE": size})))


def test_a_defect_shows_its_traceback_once(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    result = run("train", "run.toml", "--nproc", "3", "--run.dir=out", "--data.text_field", "crash")
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1 and "waited" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("bytescale: rank 1 (pid ")
    assert result.stderr.endswith("failed with exit code 1 after step 2: RuntimeError: a defect\n")


def test_torchrun(run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    result = run("train", "run.toml", "--run.dir=out", **TORCHRUN)
    assert result.returncode == 0 and "check" not in result.stdout, "a rank prepares where others know that it lives"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["rank1"]
    assert "RANK = 1 and WORLD_SIZE = 2 are set" in complaint(run("train", "run.toml", "--nproc", "2", **TORCHRUN))
    mismatch = run("train", "run.toml", "--parallel.hdp_size", "3", **TORCHRUN)
    assert complaint(mismatch).startswith("rank 1: pp_size * tp_size * hdp_size")


@pytest.mark.parametrize(
    ("parallel", "world_size", "words"),
    [
        (ParallelConfig(), 5, None),
        (ParallelConfig(pp_size=2), 4, None),
        (ParallelConfig(pp_size=2, tp_size=2, hdp_size=3), 12, None),
        (ParallelConfig(pp_size=2, tp_size=2, hdp_size=3), 11, r"2 \* 2 \* 3 = 12, but the world has 11 ranks"),
        (ParallelConfig(hdp_size=2), 1, r"the world has 1 rank: start 2 \(--nproc 2\)"),
        (ParallelConfig(pp_size=2), 3, r"a world of 3 ranks cannot be cut .* start a multiple of 2"),
    ],
)
def test_world_sizes(parallel: ParallelConfig, world_size: int, words: str | None) -> None:
    if words is None:
        parallel.check_world_size(world_size)
    else:
        with pytest.raises(UserError, match=words):
            parallel.check_world_size(world_size)


def test_every_listed_command_exists() -> None:
    for name, (module, help_line) in cli._COMMANDS.items():
        commands = [v for v in vars(importlib.import_module(module)).values() if isinstance(v, click.Command)]
        assert [command.name for command in commands] == [name]
        assert help_line.endswith(".")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UserError("a\nb"), 2, "bytescale: a b\n"),
        (click.UsageError("what"), 2, "bytescale: what\n"),
        (CommunicationError("rank 0 lost rank 1"), 1, "bytescale: rank 0 lost rank 1\n"),
        (KeyboardInterrupt(), 130, ""),
        (RuntimeError("a defect"), 1, "RuntimeError: a defect\n"),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, words: str
) -> None:
    @click.command("fail")
    def fail() -> None:
        raise error

    module = types.ModuleType("tests.fail")
    module.fail = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tests.fail", module)
    monkeypatch.setitem(cli._COMMANDS, "fail", ("tests.fail", "Fails."))
    for name in ("RANK", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["fail"]) == code
    err = capsys.readouterr().err
    assert err.endswith(words)
    assert ("Traceback" in err) == (type(error) is RuntimeError)


def test_a_reader_that_goes_away_ends_the_program_quietly() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "bytescale", "--help"]
    result = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write_end)
    assert (result.returncode, result.stderr) == (1, "")


@pytest.mark.parametrize(("rank", "output"), [("0", "done\n"), (None, "done\nthe interpreter is taken down\n")])
def test_a_rank_of_torchrun_ends_at_once(rank: str | None, output: str) -> None:
    """Threads of process groups may outlive a run; the interpreter's end would abort the process then."""
    code = (
        "import atexit, sys; from bytescale.cli.ranks import end_rank; "
        "atexit.register(print, 'the interpreter is taken down'); print('done'); sys.exit(end_rank(143))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "RANK"} | ({} if rank is None else {"RANK": rank})
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (143, output)
