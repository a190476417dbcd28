"""Where a run begins: from which checkpoints, in whose directory, and what is cleared."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bytescale.config.schema import BatchConfig, Config, DataConfig, ModelConfig
from bytescale.errors import UserError
from bytescale.locks import launcher_name
from bytescale.train.resuming.origin import Origin, find_origin
from bytescale.train.run_dir import check_checkpoint_dir, check_run_dir, open_checkpoint_dir, open_run_dir


def config(run_dir: Path, resume: str = "off", directory: Path | None = None) -> Config:
    base = Config(model=ModelConfig(config={}), data=DataConfig(source="python-stdlib"), batch=BatchConfig(sequences=1))
    place = None if directory is None else str(directory)
    return replace(
        base,
        run=replace(base.run, dir=str(run_dir)),
        checkpoint=replace(base.checkpoint, resume=resume, dir=place),
    )


def checkpoint(directory: Path, step: int) -> Path:
    path = directory / f"step-{step:06d}"
    path.mkdir(parents=True)
    (path / "manifest.json").touch()
    return path


def test_what_resume_means(tmp_path: Path) -> None:
    run_dir, other = tmp_path / "run", tmp_path / "other"
    assert find_origin(config(run_dir)) == find_origin(config(run_dir, "auto")) == Origin()
    two, ten = (checkpoint(run_dir / "checkpoints", step) for step in (2, 10))
    theirs = checkpoint(other / "checkpoints", 4)
    assert find_origin(config(run_dir)) == Origin()
    assert find_origin(config(run_dir, "auto")) == Origin((ten, two), goes_on=True)
    assert find_origin(config(run_dir, str(two))) == Origin((two,), goes_on=True, is_asked=True)
    assert find_origin(config(run_dir, str(run_dir))) == Origin((ten, two), goes_on=True)
    assert find_origin(config(run_dir, str(other))) == Origin((theirs,))
    assert find_origin(config(run_dir, "auto", other / "checkpoints")) == Origin((theirs,), goes_on=True)
    with pytest.raises(UserError, match="is no checkpoint and holds none"):
        find_origin(config(run_dir, str(tmp_path)))


def test_only_the_same_launcher_finds_its_own_earlier_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for run_dir, launcher in ((mine, launcher_name()), (theirs, "elsewhere-1")):
        run_dir.mkdir()
        (run_dir / "processes.json").write_text(json.dumps([{"rank": 0, "launcher": launcher}]))
    assert not find_origin(config(mine)).may_clear
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert find_origin(config(mine)) == Origin(may_clear=True) and find_origin(config(theirs)) == Origin()
    paths = [checkpoint(run_dir / "checkpoints", 3) for run_dir in (mine, theirs)]
    # Whatever `resume` says: it was for the first attempt.
    assert find_origin(config(mine, str(paths[1]))) == Origin((paths[0],), goes_on=True)
    assert find_origin(config(theirs)) == Origin()


def test_checkpoints_of_another_course_go_and_nothing_else(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    paths = [checkpoint(directory, step) for step in (2, 4, 6)]
    (directory / ".step-000007.new").mkdir()
    (directory / "notes.txt").touch()
    with open_checkpoint_dir(directory, 4) as removed:
        assert removed == ["step-000006"]
        assert sorted(path.name for path in directory.iterdir()) == ["notes.txt", "step-000002", "step-000004"]
        with pytest.raises(UserError, match=r"checkpoint\.dir = .* is in use by another run"):
            open_checkpoint_dir(directory, 4).__enter__()
    with open_checkpoint_dir(directory, 0) as removed:
        assert sorted(removed) == ["step-000002", "step-000004"]
    with open_checkpoint_dir(tmp_path / "none", 0) as removed:
        assert removed == [] and not (tmp_path / "none").exists()
    assert not any(path.exists() for path in paths)


def test_a_run_directory_with_checkpoints_is_used(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoints", 2)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    words = r"holds the results of an earlier run \(metrics\.jsonl, checkpoints\); go on with --resume auto, or choose"
    with pytest.raises(UserError, match=words):
        check_run_dir(tmp_path, save_model=True)
    with pytest.raises(UserError, match=r"checkpoint\.dir = .* holds checkpoints of an earlier run"):
        check_checkpoint_dir(path.parent)
    check_run_dir(tmp_path, save_model=True, goes_on=True)
    check_checkpoint_dir(path.parent, goes_on=True)
    with open_run_dir(tmp_path, goes_on=True):
        assert (tmp_path / "metrics.jsonl").read_text() == "{}\n" and path.exists()
