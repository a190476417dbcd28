"""Replacing a model: killed at any system call, the old or the new one is there, at the next start at the latest."""

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from bytescale.errors import RunError, UserError
from bytescale.train.run_dir import check_run_dir, open_run_dir
from bytescale.train.saving import model_dir
from bytescale.train.saving.model_dir import replace_directory, replacing

FILES = ("config.json", "model.safetensors")


def fill(directory: Path, what: str) -> None:
    for name in FILES:
        (directory / name).write_text(what * 100)


def model_of(run_dir: Path) -> str | None:
    """`old` or `new` where a whole model of that kind is there, None where there is none."""
    model = run_dir / "model"
    if not model.exists():
        return None
    contents = {(model / name).read_text() for name in FILES}
    assert sorted(path.name for path in model.iterdir()) == sorted(FILES)
    assert contents in ({"old" * 100}, {"new" * 100})
    return "old" if contents == {"old" * 100} else "new"


def kill_at(number: int, run_dir: Path, *, exchange: bool) -> bool:
    """Replace the model in a child that ends at its `number`th event; whether it came to its own end before.

    Events are the calls of the operating system, before they happen, and the returns of our own functions, which
    cover the one call that is made through ctypes.
    """
    child = os.fork()
    if child == 0:
        seen = 0

        def watch(frame: Any, event: str, argument: Any) -> None:
            nonlocal seen
            ours = frame.f_code.co_filename == model_dir.__file__
            if (event == "c_call" and argument.__module__ in ("posix", "_io")) or (event == "return" and ours):
                seen += 1
                if seen == number:
                    os._exit(1)

        if not exchange:
            model_dir.exchange = lambda left, right: False  # type: ignore[assignment]
        sys.setprofile(watch)
        with replacing(run_dir / "model") as directory:
            fill(directory, "new")
        sys.setprofile(None)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(("before", "exchange"), [("old", True), ("old", False), (None, True)])
def test_a_kill_at_any_point_leaves_the_old_or_the_new(tmp_path: Path, before: str | None, exchange: bool) -> None:
    outcomes = []
    for number in range(1, 1000):
        run_dir = tmp_path / str(number)
        run_dir.mkdir()
        if before is not None:
            (run_dir / "model").mkdir()
            fill(run_dir / "model", before)
        done = kill_at(number, run_dir, exchange=exchange)
        if exchange:
            assert model_of(run_dir) in (before, "new")
        # The next start refuses the directory or takes it; both put the model right first.
        try:
            check_run_dir(run_dir, save_model=True)
        except UserError:
            assert before == "old" or model_of(run_dir) == "new"
        assert model_of(run_dir) in (before, "new")
        assert [path.name for path in run_dir.iterdir() if path.name != "model"] == []
        outcomes.append(model_of(run_dir))
        if done:
            break
    assert outcomes[-1] == "new" and len(outcomes) > 30
    # Once the new one is there it stays.
    assert outcomes == sorted(outcomes, key=lambda outcome: outcome == "new")


def test_the_kernel_exchanges_directories_here(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert model_dir.exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "b").exists() and (tmp_path / "b" / "a").exists()
    with pytest.raises(OSError) as caught:
        model_dir.exchange(tmp_path / "a", tmp_path / "c")
    assert caught.value.errno == errno.ENOENT


def test_a_failed_replacement_leaves_the_old(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    fill(target, "old")

    def fail() -> None:
        with replacing(target) as directory:
            (directory / "config.json").write_text("new")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert model_of(tmp_path) == "old" and [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    for name in ("model", "new"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "notes.txt").touch()
    with pytest.raises(RunError, match="is not a checkpoint and is not replaced; the model is left in"):
        replace_directory(tmp_path / "new", tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "new"]


def test_a_start_that_overwrites_leaves_nothing_of_an_interrupted_replacement(tmp_path: Path) -> None:
    for name in (".model.whole", ".model.old", ".model.new"):
        (tmp_path / name).mkdir()
        fill(tmp_path / name, "new")
    with open_run_dir(tmp_path, overwrite=True):
        assert list(tmp_path.iterdir()) == []
