"""Saving: what is published is what the call saw; a failure costs one checkpoint; whatever dies, all or nothing."""

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bytescale.checkpoint import writer as writer_module
from bytescale.checkpoint.directory import checkpoint_path, find_checkpoints, remove_leftovers, unpublished_path
from bytescale.checkpoint.slices import Slice
from bytescale.checkpoint.stored import StoredCheckpoint, read_checkpoint
from bytescale.checkpoint.writer import CheckpointWriter
from bytescale.errors import UserError
from tests.ranks import RankPool, Ranks


def writer(directory: Path, **options: Any) -> CheckpointWriter:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    return CheckpointWriter(directory, 0, 1, store, **{"keep": 2, "timeout_s": 5.0, **options})


def state() -> list[Slice]:
    """Two slices whose memory can be written to."""
    return [
        Slice("w", (4, 3), (0, 0), torch.arange(12.0).view(4, 3)),
        Slice("optimizer/step/w", (), (), torch.tensor(1.0)),
    ]


def sound(path: Path) -> StoredCheckpoint:
    found = read_checkpoint(path)
    assert found.damage() is None
    return found


def whole(path: Path, name: str) -> torch.Tensor:
    with sound(path).tensors() as reader:
        return reader.whole(name)


@pytest.mark.parametrize("in_background", [True, False])
def test_what_is_published_is_what_the_call_saw(tmp_path: Path, in_background: bool) -> None:
    saver, slices = writer(tmp_path, in_background=in_background), state()
    for step in (1, 2, 3):
        expected = slices[0].tensor.clone()
        saver.save(step, slices, {"step": step})
        slices[0].tensor.add_(1)
        saver.wait()
        assert torch.equal(whole(checkpoint_path(tmp_path, step), "w"), expected)
        assert sound(checkpoint_path(tmp_path, step)).values == {"step": step}
    assert [(saved.step, saved.failure) for saved in saver.ended()] == [(1, None), (2, None), (3, None)]
    assert saver.ended() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    write = writer_module.write_tensors

    def slow(path: Path, tensors: Any) -> str:
        begun.set()
        assert go_on.wait(20)
        return write(path, tensors)

    monkeypatch.setattr(writer_module, "write_tensors", slow)
    saver, slices = writer(tmp_path), state()
    saver.save(1, slices, {})
    assert begun.wait(20) and find_checkpoints(tmp_path) == []
    threading.Timer(0.05, go_on.set).start()
    saver.save(2, slices, {})
    assert [path.name for path in find_checkpoints(tmp_path)][-1] == "step-000001"
    saver.wait()


def test_a_disk_that_hangs_costs_the_checkpoints_that_it_does_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, write = threading.Event(), writer_module.write_tensors
    monkeypatch.setattr(writer_module, "write_tensors", lambda path, tensors: go_on.wait(20) and write(path, tensors))
    saver = writer(tmp_path, timeout_s=0.1)
    saver.save(1, state(), {})
    saver.save(2, state(), {})
    assert not saver.wait()
    assert [(saved.step, saved.failure) for saved in saver.ended()] == [
        (2, "the checkpoint before it is still being written after 0 s")
    ]
    go_on.set()
    until_written(saver)
    saver.save(3, state(), {})
    until_written(saver)
    assert [(saved.step, saved.failure) for saved in saver.ended()] == [(1, None), (3, None)]


def until_written(saver: CheckpointWriter) -> None:
    """A busy machine may take longer than the short wait of these tests."""
    give_up_s = time.monotonic() + 20
    while not saver.wait():
        assert time.monotonic() < give_up_s


def full(*_: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("place", ["write_tensors", "write_text_atomically", "write_manifest", "publish"])
def test_a_failed_write_costs_that_checkpoint_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    saver = writer(tmp_path)
    saver.save(1, state(), {})
    saver.wait()
    with monkeypatch.context() as broken:
        broken.setattr(writer_module, place, full)
        saver.save(2, state(), {})
        saver.wait()
    first, second = saver.ended()
    assert first.failure is None and second.step == 2
    assert second.failure is not None and second.failure.endswith(": No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    saver.save(3, state(), {})
    saver.wait()
    assert [saved.failure for saved in saver.ended()] == [None]
    sound(checkpoint_path(tmp_path, 3))


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    saver = writer(tmp_path / "taken")
    saver.save(1, state(), {})
    saver.wait()
    (saved,) = saver.ended()
    assert saved.failure is not None and "taken" in saved.failure and "Not a directory" in saved.failure


def test_the_same_step_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    for value in (1, 2):
        saver = writer(tmp_path)
        saver.save(7, state(), {"value": value})
        saver.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000007"]
    assert sound(checkpoint_path(tmp_path, 7)).values == {"value": 2}


def test_parts_that_do_not_make_the_whole_are_not_published(tmp_path: Path) -> None:
    saver = writer(tmp_path)
    saver.save(1, [Slice("w", (4,), (0,), torch.ones(2))], {})
    saver.wait()
    (saved,) = saver.ended()
    assert saved.failure is not None and "the parts of w do not make the whole" in saved.failure
    assert list(tmp_path.iterdir()) == []


def _save(ranks: Ranks, directory: Path, missing: int | None, broken: int | None) -> Any:
    store: Any = dist.FileStore(str(directory / "store"), ranks.size)  # type: ignore[attr-defined]
    saver = CheckpointWriter(directory / "c", ranks.rank, ranks.size, store, keep=2, timeout_s=0.5 if missing else 30.0)
    part = Slice("w", (ranks.size, 3), (ranks.rank, 0), torch.full((1, 3), float(ranks.rank)))
    if ranks.rank == broken:
        (directory / "c" / ".step-000001.new" / f"rank-{broken:05d}.safetensors").mkdir(parents=True)
    dist.barrier(group=ranks.group)
    if ranks.rank != missing:
        saver.save(1, [part], {})
        while not saver.wait():
            pass
    dist.barrier(group=ranks.group)
    return [(saved.step, saved.failure) for saved in saver.ended()]


@pytest.mark.long
def test_ranks_agree_on_what_is_whole(ranks: RankPool, tmp_path: Path) -> None:
    for name, missing, broken in (("good", None, None), ("missing", 2, None), ("broken", None, 1)):
        directory = tmp_path / name
        directory.mkdir()
        ((_, failure),), *others = ranks.run(3, _save, directory, missing, broken)
        assert others == [[], []]
        published = [path.name for path in find_checkpoints(directory / "c")]
        assert published == (["step-000001"] if name == "good" else [])
        if name == "good":
            assert failure is None
            assert whole(directory / "c" / published[0], "w").tolist() == [[0.0] * 3, [1.0] * 3, [2.0] * 3]
        elif name == "missing":
            assert failure == "rank 2 has not written its part within 0 s"
        else:
            assert failure.startswith("rank 1: cannot write ") and failure.endswith("Is a directory")


def stored(directory: Path) -> Path:
    saver = writer(directory)
    saver.save(5, state(), {"step": 5})
    saver.wait()
    return checkpoint_path(directory, 5)


def problem(path: Path) -> str | None:
    try:
        return read_checkpoint(path).damage()
    except UserError as error:
        return str(error)


def test_a_file_that_is_cut_anywhere_is_named(tmp_path: Path) -> None:
    path = stored(tmp_path)
    assert problem(path) is None
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for length in range(0, len(data), 16):
            file.write_bytes(data[:length])
            found = problem(path)
            assert found is not None and file.name in found
        file.unlink()
        found = problem(path)
        assert found is not None and file.name in found
        file.write_bytes(data)
    assert problem(path) is None


def test_any_flipped_bit_is_found(tmp_path: Path) -> None:
    path = stored(tmp_path)
    for file in sorted(path.iterdir()):
        data = bytearray(file.read_bytes())
        for place in range(0, len(data), 7):
            bit = 1 << place % 8
            data[place] ^= bit
            file.write_bytes(data)
            # White space between the values of the manifest is the one place where a bit may not matter.
            assert problem(path) is not None or json.loads(data) == json.loads(before(data, place, bit))
            data[place] ^= bit
        file.write_bytes(data)
    assert problem(path) is None


def before(data: bytearray, place: int, bit: int) -> bytes:
    other = bytearray(data)
    other[place] ^= bit
    return bytes(other)


def change(function: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        manifest = json.loads((path / "manifest.json").read_text())
        function(manifest)
        (path / "manifest.json").write_text(json.dumps(manifest))

    return apply


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (change(lambda m: m.update(version=2)), "has version 2 of the format, this program reads version 1; update it"),
        (change(lambda m: m.update(format="other")), "manifest.json is damaged: ValueError: format 'other'"),
        (change(lambda m: m["files"].pop("index.json")), "does not list index.json"),
        (change(lambda m: m["files"].pop("rank-00000.safetensors")), "does not list rank-00000.safetensors"),
        (change(lambda m: m["files"].update({"../x": [1, "00"]})), "does not list ../x as a file of the checkpoint"),
        (lambda path: shutil.rmtree(path), "is not a checkpoint: it holds no manifest.json"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path, damage: Callable[[Path], None], words: str) -> None:
    path = stored(tmp_path)
    damage(path)
    with pytest.raises(UserError) as caught:
        read_checkpoint(path)
    assert words in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_leftovers_are_no_checkpoints_and_go(tmp_path: Path) -> None:
    path = stored(tmp_path)
    shutil.copytree(path, unpublished_path(tmp_path, 6))
    shutil.copytree(path, tmp_path / ".step-000004.old")
    (tmp_path / "notes").mkdir()
    assert find_checkpoints(tmp_path) == [path]
    remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes", "step-000005"]
    assert find_checkpoints(tmp_path / "nowhere") == []
    remove_leftovers(tmp_path / "nowhere")
