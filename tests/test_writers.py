"""Metrics for other programs: what their own readers find in the files."""

import json
import struct
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from bytescale.errors import RunError, UserError
from bytescale.report import writers
from bytescale.report.writers import check_writers, numbers, open_writers

LINES = [
    {"step": 1, "timestamp": 1.5e9, "loss": 5.5, "tokens": 4000, "grad_norm": None, "comm_bytes_static": None},
    {"step": 2, "timestamp": 1.5e9 + 1, "loss": 5.25, "tokens": 4100, "grad_norm": 1.0, "eval_loss": 5.0},
]


def scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value) as TensorBoard shows them, all starts of the run together."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir / "tensorboard"))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def write(run_dir: Path, *names: str, lines: list[dict[str, Any]] = LINES) -> list[str]:
    with open_writers(names, run_dir, {"train": {"steps": 2}, "model": {"path": None}}) as write_line:
        return [failure for line in lines for failure in write_line(line)]


def test_tensorboard_shows_what_the_metrics_say(tmp_path: Path) -> None:
    assert write(tmp_path, "tensorboard") == []
    expected = {"loss": [(1, 5.5), (2, 5.25)], "tokens": [(1, 4000.0), (2, 4100.0)]}
    assert scalars(tmp_path) == expected | {"grad_norm": [(2, 1.0)], "eval_loss": [(2, 5.0)]}
    assert len(list(tmp_path.rglob("*"))) == 2


def test_tensorboard_shows_every_step_once_after_a_second_start(tmp_path: Path) -> None:
    write(tmp_path, "tensorboard", lines=[{"step": n, "timestamp": 1.0 * n, "loss": 1.0 * n} for n in (1, 2, 3, 4)])
    write(tmp_path, "tensorboard", lines=[{"step": n, "timestamp": 10.0 * n, "loss": 10.0 * n} for n in (3, 4)])
    assert scalars(tmp_path)["loss"] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]


def test_a_killed_run_keeps_what_tensorboard_was_given(tmp_path: Path) -> None:
    with open_writers(["tensorboard"], tmp_path, {}) as write_line:
        write_line(LINES[0])
        assert scalars(tmp_path)["loss"] == [(1, 5.5)]


def records(path: Path) -> Iterator[bytes]:
    """The records of a `.wandb` file: a header of 7 bytes, then blocks of 32 KiB; (crc, length, type) before each."""
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record = (b"" if kind in (1, 2) else record) + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record


def test_wandb_stores_the_metrics_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.proto import wandb_internal_pb2

    # Whatever a user's environment says, nothing is sent.
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert write(tmp_path, "wandb") == []
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    steps, config = [], {}
    for data in records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            steps.append({key: value for key, value in items.items() if not key.startswith("_") or key == "_step"})
        if record.WhichOneof("record_type") == "run":
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
    assert steps == [{"_step": line["step"], **numbers(line)} for line in LINES]
    assert config["train"] == {"steps": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["wandb"]


class _Failing:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def write(self, step: int, time_s: float, values: dict[str, float]) -> None:
        self.steps.append(step)
        raise OSError("No space left on device\nsecond line")

    def close(self) -> None:
        raise OSError("still none")


def test_a_writer_that_fails_is_left_out_and_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, real = _Failing(), writers._open
    opened: Callable[..., Any] = lambda name, *rest: writer if name == "wandb" else real(name, *rest)  # noqa: E731
    monkeypatch.setattr(writers, "_open", opened)
    failures = write(tmp_path, "wandb", "tensorboard")
    assert failures == ["warning: step 1: wandb cannot write, and is left out from here: No space left on device"]
    assert writer.steps == [1] and scalars(tmp_path)["loss"] == [(1, 5.5), (2, 5.25)]


def test_what_cannot_begin_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(RunError, match=r"^run\.writers: tensorboard cannot begin in .*File exists") as caught:
        write(tmp_path, "tensorboard")
    assert "\n" not in str(caught.value)
    for spec in (None, ModuleSpec("wandb", None)):
        monkeypatch.setattr(writers, "find_spec", lambda name, spec=spec: spec)
        with pytest.raises(UserError) as missing:
            check_writers(["wandb"])
        assert str(missing.value) == "run.writers: wandb is not installed: pip install 'bytescale[wandb]'"
    check_writers([])


def test_tables_of_a_step_are_numbers_too() -> None:
    line = {"step": 1, "loss": float("nan"), "on": True, "sources": {"a/b": {"tokens": 3, "name": "x"}, "c": {}}}
    assert numbers(line) == {"sources/a/b/tokens": 3.0}
