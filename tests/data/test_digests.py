import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from bytescale.config.data import DataConfig
from bytescale.data import open_dataset
from bytescale.data.digests import MAX_STATES, file_digests
from bytescale.errors import UserError


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every file that is read for its digest."""
    sizes: list[int] = []
    digest = hashlib.file_digest

    def counted(file: Any, *more: Any) -> Any:
        sizes.append(os.fstat(file.fileno()).st_size)
        return digest(file, *more)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    return sizes


def at_rest(path: Path, text: str) -> Path:
    """A file that was written long ago."""
    path.write_text(text)
    os.utime(path, (1e9, 1e9))
    return path


def test_the_corpus_is_read_once_for_all_ranks_and_starts(tmp_path: Path, reads: list[int]) -> None:
    path = at_rest(tmp_path / "x.jsonl", '{"text": "word"}\n' * 50)
    config = DataConfig(source="jsonl", path=str(path), cache_dir=str(tmp_path / "cache"))
    lengths = [open_dataset(config).lengths.tolist() for _ in range(5)]
    assert reads == [path.stat().st_size]
    assert lengths == [[5] * 50] * 5
    at_rest(path, '{"text": "words"}\n' * 50)
    assert open_dataset(config).lengths.tolist() == [6] * 50
    assert len(reads) == 2


def test_what_changed_is_read_again(tmp_path: Path, reads: list[int]) -> None:
    manifest = tmp_path / "manifest.json"
    paths = [at_rest(tmp_path / name, name) for name in "abc"]
    first = file_digests(paths, manifest)
    assert first == [hashlib.blake2b(name.encode(), digest_size=20).hexdigest() for name in "abc"]
    assert first == file_digests(paths)
    assert len(reads) == 6
    at_rest(paths[1], "B")
    second = file_digests([*paths, at_rest(tmp_path / "d", "d")], manifest)
    assert (second[0], second[2]) == (first[0], first[2])
    assert second[1] != first[1]
    assert len(reads) == 8
    # Files that are not asked for now are remembered all the same.
    assert file_digests(paths[:1], manifest) == first[:1]
    assert file_digests([tmp_path / "d"], manifest) == second[3:]
    assert len(reads) == 8


def test_a_file_just_written_is_read_again(tmp_path: Path, reads: list[int]) -> None:
    """It may change once more in the same tick of its clock, with size and times as they were."""
    path, manifest = tmp_path / "x", tmp_path / "manifest.json"
    path.write_text("one")
    assert file_digests([path], manifest) == file_digests([path], manifest)
    assert len(reads) == 2
    os.utime(path, (4e9, 4e9))
    file_digests([path], manifest), file_digests([path], manifest)
    assert len(reads) == 4


def test_several_states_of_one_path_are_remembered(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    for text in ("a", "ab", "abc", "abcd", "abcde", "abcdef"):
        file_digests([at_rest(tmp_path / "x", text)], manifest)
    (states,) = json.loads(manifest.read_text()).values()
    assert len(states) == MAX_STATES


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 1}', '{"PATH": [[1, 2]]}', '{"PATH": [[[1], 2, "zz"]]}'])
def test_a_broken_manifest_is_none(tmp_path: Path, content: str, reads: list[int]) -> None:
    path, manifest = at_rest(tmp_path / "x", "text"), tmp_path / "manifest.json"
    manifest.write_text(content.replace("PATH", str(path)))
    assert file_digests([path], manifest) == file_digests([path], manifest)
    assert len(reads) == 1


def test_a_manifest_that_cannot_be_written(tmp_path: Path) -> None:
    path = at_rest(tmp_path / "x", "text")
    assert file_digests([path], path / "manifest.json") == file_digests([path])


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*gone: No such file"):
        file_digests([tmp_path / "gone"], tmp_path / "manifest.json")
