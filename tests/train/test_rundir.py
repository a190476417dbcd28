"""The run directory: refusals, one run at a time, whole files, and what is never deleted."""

import json
import math
import shutil
from pathlib import Path

import pytest

from bytescale.errors import RunError, UserError
from bytescale.train.measure.metrics import MetricsFile
from bytescale.train.run_dir import check_run_dir, open_run_dir, writing


@pytest.mark.parametrize("name", ["config.toml", "processes.json", "metrics.jsonl", "trace.json", "report.html"])
def test_a_directory_in_the_place_of_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"holds {name}, which is a directory"):
        check_run_dir(tmp_path, save_model=False)


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    model = tmp_path / "model"
    check_run_dir(tmp_path, save_model=True, overwrite=True)
    model.mkdir()
    check_run_dir(tmp_path, save_model=True, overwrite=True)
    (model / "notes.txt").write_text("precious")
    with pytest.raises(UserError, match="holds model, which is not a checkpoint"):
        check_run_dir(tmp_path, save_model=True)
    with pytest.raises(UserError, match="holds model, which is not a checkpoint"):
        check_run_dir(tmp_path, save_model=False, overwrite=True)
    (model / "config.json").write_text("{}")
    check_run_dir(tmp_path, save_model=True, overwrite=True)
    for place in ("file", "dangling"):
        directory = tmp_path / place
        directory.mkdir()
        (directory / "model").symlink_to("nowhere") if place == "dangling" else (directory / "model").touch()
        with pytest.raises(UserError, match="holds model"):
            check_run_dir(directory, save_model=True)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in ("file", "file/below", "x" * 300):
        with pytest.raises(UserError, match="cannot be written"):
            check_run_dir(tmp_path / place, save_model=True)


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with open_run_dir(tmp_path):
        with pytest.raises(UserError, match="is in use by another run"):
            check_run_dir(tmp_path, save_model=True)
        with pytest.raises(UserError, match="is in use by another run"), open_run_dir(tmp_path):
            pass
    check_run_dir(tmp_path, save_model=True)
    with open_run_dir(tmp_path):
        pass


def used(run_dir: Path) -> None:
    """A directory as a finished run leaves it."""
    for name in ("config.toml", "processes.json", "metrics.jsonl", "trace.json", "summary.json", "report.html"):
        (run_dir / name).write_text(f"old {name}")
    (run_dir / "model").mkdir()
    (run_dir / "model" / "config.json").write_text("{}")


@pytest.mark.parametrize("name", ["metrics.jsonl", "trace.json", "summary.json", "report.html", "model"])
def test_a_used_directory_is_refused_or_overwritten_whole(tmp_path: Path, name: str) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    used(run_dir)
    for path in run_dir.iterdir():
        if path.name not in ("config.toml", "processes.json", name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (run_dir / "notes.txt").touch()
    left = sorted(path.name for path in run_dir.iterdir())
    words = rf"run \({name}\) and no checkpoint to go on from; choose another run\.dir, or set run\.overwrite = true"
    with pytest.raises(UserError, match=words):
        check_run_dir(run_dir, save_model=True)
    with pytest.raises(UserError, match=words), open_run_dir(run_dir):
        pass
    assert sorted(path.name for path in run_dir.iterdir()) == left
    check_run_dir(run_dir, save_model=True, overwrite=True)
    assert sorted(path.name for path in run_dir.iterdir()) == left
    with open_run_dir(run_dir, overwrite=True):
        assert [path.name for path in run_dir.iterdir()] == ["notes.txt"]


def test_a_run_that_never_came_to_a_step_left_nothing_worth_keeping(tmp_path: Path) -> None:
    for name in ("config.toml", "processes.json", "metrics.jsonl", ".trace.json.x1"):
        (tmp_path / name).touch()
    check_run_dir(tmp_path, save_model=True)
    with open_run_dir(tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.write({"step": 1})

        class Full:
            """The file as a full disk shows it: half of the bytes are taken, then none."""

            def __init__(self, real: object) -> None:
                self.real = real

            def write(self, data: bytes) -> int:
                return self.real.write(data[: len(data) // 2])

            def __getattr__(self, name: str) -> object:
                return getattr(self.real, name)

        monkeypatch.setattr(file, "_file", Full(file._file))
        with pytest.raises(RunError, match=r"cannot write .*metrics\.jsonl: No space left on device"):
            file.write({"step": 2})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1}]


def test_metrics_are_json_or_nothing(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as file, pytest.raises(ValueError, match="JSON"):
        file.write({"loss": math.nan})
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_failed_write_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot write .*x: Is a directory"), writing(tmp_path / "x"):
        (tmp_path).write_text("")
