import errno
import fcntl
import multiprocessing as mp
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bytescale.config.data import DataConfig
from bytescale.data import build, cache
from bytescale.data.cache import cache_key, default_cache_dir, open_corpus
from bytescale.data.encoding.encoder import Encoder
from bytescale.data.sources.source import DocumentSource, open_source
from bytescale.data.tokenizers import ByteTokenizer
from bytescale.errors import UserError
from bytescale.locks import machine_name
from tests.data.corpora import write_jsonl, write_tree


class LoggingTokenizer(ByteTokenizer):
    """Leaves one file in `log` for every batch encoded."""

    log: Path

    def encode(self, texts: Sequence[str]) -> tuple[Any, Any]:
        (self.log / f"{os.getpid()}-{time.monotonic_ns()}").touch()
        time.sleep(0.2)
        return super().encode(texts)


class WideTokenizer(ByteTokenizer):
    """Bytes, but with ids that need more than 16 bits."""

    def encode(self, texts: Sequence[str]) -> tuple[Any, Any]:
        tokens, lengths = super().encode(texts)
        return tokens.astype(np.uint32) + 70_000, lengths


def tree(root: Path) -> DocumentSource:
    write_tree(root, {"a.txt": "one", "b.txt": "", "c.txt": "three é"})
    return open_source(DataConfig(source="text-tree", path=str(root)))


def entries(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix not in (".lock", ".json"))


def test_round_trip(tmp_path: Path) -> None:
    source = tree(tmp_path / "text")
    for _ in range(2):
        corpus = open_corpus(source, Encoder(ByteTokenizer()), str(tmp_path / "cache"))
        assert corpus.offsets.tolist() == [0, 4, 5, 14]
        assert corpus.tokens.tolist() == [*b"one", 256, 256, *"three é".encode(), 256]
        assert corpus.tokens.dtype == np.uint16
        assert isinstance(corpus.tokens, np.memmap)
    assert entries(tmp_path / "cache") == [cache_key(source, Encoder(ByteTokenizer()))]


def test_wide_ids(tmp_path: Path) -> None:
    tokenizer = WideTokenizer(vocab_size=70_257, fingerprint="wide")
    corpus = open_corpus(tree(tmp_path / "text"), Encoder(tokenizer), str(tmp_path / "cache"))
    assert corpus.tokens.dtype == np.uint32
    assert corpus.tokens[3] == 70_256


def test_streaming_does_not_change_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [{"text": "x" * (i * 37 % 101)} for i in range(200)]
    source = open_source(DataConfig(source="jsonl", path=str(write_jsonl(tmp_path / "x.jsonl", records))))
    whole = open_corpus(source, Encoder(ByteTokenizer()), str(tmp_path / "whole"))
    monkeypatch.setattr(build, "CHUNK_BYTES", 150)
    monkeypatch.setattr(build, "CHUNK_RECORDS", 7)
    streamed = open_corpus(source, Encoder(ByteTokenizer()), str(tmp_path / "streamed"))
    np.testing.assert_array_equal(whole.tokens, streamed.tokens)
    np.testing.assert_array_equal(whole.offsets, streamed.offsets)


def test_key_is_the_content(tmp_path: Path) -> None:
    source = tree(tmp_path / "text")
    key = cache_key(source, Encoder(ByteTokenizer()))
    shutil.copytree(tmp_path / "text", tmp_path / "moved")
    moved = open_source(DataConfig(source="text-tree", path=str(tmp_path / "moved")))
    assert cache_key(moved, Encoder(ByteTokenizer())) == key
    assert cache_key(source, Encoder(ByteTokenizer(fingerprint="other"))) != key
    write_tree(tmp_path / "text", {"a.txt": "onE"})
    assert cache_key(source, Encoder(ByteTokenizer())) != key
    before = open_corpus(moved, Encoder(ByteTokenizer()), str(tmp_path / "cache"))
    after = open_corpus(source, Encoder(ByteTokenizer()), str(tmp_path / "cache"))
    assert (before.tokens[2], after.tokens[2]) == (ord("e"), ord("E"))


@pytest.mark.parametrize("name", ["tokens.npy", "offsets.npy", "digests.npy", "meta.json"])
@pytest.mark.parametrize("damage", ["cut", "empty", "gone"])
def test_damaged_entry_is_rebuilt(tmp_path: Path, name: str, damage: str) -> None:
    source = tree(tmp_path / "text")
    directory = tmp_path / "cache"
    expected = np.array(open_corpus(source, Encoder(ByteTokenizer()), str(directory)).tokens)
    victim = directory / cache_key(source, Encoder(ByteTokenizer())) / name
    if damage == "gone":
        victim.unlink()
    else:
        os.truncate(victim, victim.stat().st_size - 3 if damage == "cut" else 0)
    np.testing.assert_array_equal(open_corpus(source, Encoder(ByteTokenizer()), str(directory)).tokens, expected)
    assert victim.stat().st_size > 0
    assert len(entries(directory)) == 1


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    write_tree(tmp_path / "text", {"a.txt": "fine", "b.txt": b"\xff"})
    source = open_source(DataConfig(source="text-tree", path=str(tmp_path / "text")))
    with pytest.raises(UserError, match=r"b\.txt is not UTF-8"):
        open_corpus(source, Encoder(ByteTokenizer()), str(tmp_path / "cache"))
    assert entries(tmp_path / "cache") == []


def test_only_leftovers_of_the_dead_are_removed(tmp_path: Path) -> None:
    source = tree(tmp_path / "text")
    key = cache_key(source, Encoder(ByteTokenizer()))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here, there = machine_name(), "0" * 12
    names = {
        "dead": f".{key}.{here}.{gone.pid}.aa.tmp",
        "alive": f".{key}.{here}.{os.getppid()}.bb.tmp",
        "of another machine": f".another.{there}.{gone.pid}.cc.tmp",
        "nobody's": ".x.dead.tmp",
        "old": f".{key}.{there}.1.dd.tmp",
        "old shards": ".another.shards",
    }
    for what, name in names.items():
        write_tree(tmp_path / "cache", {f"{name}/tokens.npy": "half"})
        if what.startswith("old"):
            for path in (tmp_path / "cache" / name / "tokens.npy", tmp_path / "cache" / name):
                os.utime(path, (1, 1))
    open_corpus(source, Encoder(ByteTokenizer()), str(tmp_path / "cache"))
    kept = [names[what] for what in ("alive", "of another machine", "nobody's")]
    assert entries(tmp_path / "cache") == sorted([*kept, key])


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EIO])
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert open_corpus(tree(tmp_path / "text"), Encoder(ByteTokenizer()), str(tmp_path / "cache")).num_documents == 3


class WaitingTokenizer(ByteTokenizer):
    """Says when it is asked for ids, and gives them when it may."""

    asked: threading.Event
    may: threading.Event

    def encode(self, texts: Sequence[str]) -> tuple[Any, Any]:
        self.asked.set()
        assert self.may.wait(60)
        return super().encode(texts)


def test_builders_without_locks_leave_each_other_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    source, directory = tree(tmp_path / "text"), tmp_path / "cache"
    slow = WaitingTokenizer()
    object.__setattr__(slow, "asked", threading.Event())
    object.__setattr__(slow, "may", threading.Event())
    with ThreadPoolExecutor() as pool:
        first = pool.submit(open_corpus, source, Encoder(slow), str(directory))
        assert slow.asked.wait(60)
        second = open_corpus(source, Encoder(ByteTokenizer()), str(directory))
        place = (directory / cache_key(source, Encoder(slow)) / "tokens.npy").stat().st_ino
        slow.may.set()
        np.testing.assert_array_equal(first.result(60).tokens, second.tokens)
    assert (directory / cache_key(source, Encoder(slow)) / "tokens.npy").stat().st_ino == place
    assert entries(directory) == [cache_key(source, Encoder(slow))]


class BreakingTokenizer(ByteTokenizer):
    """Ends the process, as far as the cache can see, at document number `end`; counts those before."""

    count: list[int]
    end: int

    def encode(self, texts: Sequence[str]) -> tuple[Any, Any]:
        if self.count[0] + len(texts) > self.end:
            raise KeyboardInterrupt
        self.count[0] += len(texts)
        return super().encode(texts)


def breaking(end: int) -> BreakingTokenizer:
    tokenizer = BreakingTokenizer()
    object.__setattr__(tokenizer, "count", [0])
    object.__setattr__(tokenizer, "end", end)
    return tokenizer


def test_a_broken_build_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "CHUNK_RECORDS", 5)
    records = [{"text": "x" * (i * 37 % 101)} for i in range(120)]
    for name, part in (("a", records[:17]), ("b", []), ("c", records[17:])):
        write_jsonl(tmp_path / f"{name}.jsonl", part)
    source = open_source(DataConfig(source="jsonl", path=str(tmp_path / "*.jsonl")))
    whole = open_corpus(source, Encoder(ByteTokenizer()), str(tmp_path / "whole"))
    num_tokenised = 0
    for end in (0, 7, 12, 60, 25):
        tokenizer = breaking(end)
        with pytest.raises(KeyboardInterrupt):
            open_corpus(source, Encoder(tokenizer), str(tmp_path / "cache"))
        num_tokenised += tokenizer.count[0]
    tokenizer = breaking(1000)
    resumed = open_corpus(source, Encoder(tokenizer), str(tmp_path / "cache"))
    np.testing.assert_array_equal(resumed.tokens, whole.tokens)
    np.testing.assert_array_equal(resumed.offsets, whole.offsets)
    assert 120 <= num_tokenised + tokenizer.count[0] <= 120 + 5 * 10
    assert entries(tmp_path / "cache") == [cache_key(source, Encoder(ByteTokenizer()))]


def test_a_damaged_shard_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "CHUNK_RECORDS", 2)
    source = open_source(DataConfig(source="jsonl", path=str(write_jsonl(tmp_path / "x.jsonl", [{"text": "x"}] * 20))))
    made = list(build.shards(source, Encoder(ByteTokenizer()), tmp_path / "shards"))
    files = sorted((tmp_path / "shards").iterdir())
    assert len(files) == len(made) - 1 > 5
    os.truncate(files[2], files[2].stat().st_size - 30)
    again = list(build.shards(source, Encoder(ByteTokenizer()), tmp_path / "shards"))
    assert [shard.encoded.tokens.tolist() for shard in again] == [shard.encoded.tokens.tolist() for shard in made]


def test_bad_data_leaves_no_shards_but_a_file_that_cannot_be_read_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "CHUNK_RECORDS", 1)
    write_tree(tmp_path / "text", {"a.txt": "one", "b.txt": "two", "c.txt": b"\xff"})
    source = open_source(DataConfig(source="text-tree", path=str(tmp_path / "text")))
    read_bytes = Path.read_bytes

    def fail(path: Path) -> bytes:
        if path.name == "c.txt":
            raise OSError(errno.ESTALE, "Stale file handle")
        return read_bytes(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        with pytest.raises(UserError, match=r"cannot read .*c\.txt: Stale"):
            open_corpus(source, Encoder(ByteTokenizer()), str(tmp_path / "cache"))
    assert len(entries(tmp_path / "cache")) == 1
    with pytest.raises(UserError, match=r"c\.txt is not UTF-8"):
        open_corpus(source, Encoder(ByteTokenizer()), str(tmp_path / "cache"))
    assert entries(tmp_path / "cache") == []


def test_source_without_documents(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("\n\n")
    source = open_source(DataConfig(source="jsonl", path=str(tmp_path / "x.jsonl")))
    with pytest.raises(UserError, match=r'"jsonl" is empty: no document in its 1 file under'):
        open_corpus(source, Encoder(ByteTokenizer()), str(tmp_path / "cache"))


def test_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot keep tokenised data in .*file/cache.*set data\.cache_dir") as caught:
        open_corpus(tree(tmp_path / "text"), Encoder(ByteTokenizer()), str(tmp_path / "file" / "cache"))
    assert "\n" not in str(caught.value)


def test_default_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/bytescale")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_cache_dir() == Path("/home/me/.cache/bytescale")


def test_without_a_home_the_temporary_directory_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").touch()
    source = tree(tmp_path / "text")
    place = tmp_path / f"bytescale-{os.getuid()}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    corpus = open_corpus(source, Encoder(ByteTokenizer()))
    assert [str(place) in note and "Not a directory" in note for note in corpus.notes] == [True]
    assert entries(place) == [cache_key(source, Encoder(ByteTokenizer()))]
    monkeypatch.setattr(cache, "default_cache_dir", lambda: None)
    assert "there is no home directory" in open_corpus(source, Encoder(ByteTokenizer())).notes[0]
    place.chmod(0o777)
    with pytest.raises(UserError, match=r"not this user's alone; set data\.cache_dir"):
        open_corpus(source, Encoder(ByteTokenizer()))


def _open_in_process(root: Path, log: Path, queue: Any) -> None:
    tokenizer = LoggingTokenizer()
    object.__setattr__(tokenizer, "log", log)
    source = open_source(DataConfig(source="text-tree", path=str(root / "text")))
    queue.put(open_corpus(source, Encoder(tokenizer), str(root / "cache")).tokens.tolist())


def test_processes_share_one_build(tmp_path: Path) -> None:
    source = tree(tmp_path / "text")
    log = tmp_path / "log"
    log.mkdir()
    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_open_in_process, args=(tmp_path, log, queue)) for _ in range(4)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    expected = open_corpus(source, Encoder(ByteTokenizer()), str(tmp_path / "cache")).tokens.tolist()
    assert results == [expected] * 4
    assert len(list(log.iterdir())) == 1


def _hold_lock(path: Path, locked: Any) -> None:
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        locked.set()
        time.sleep(60)


def test_wait_is_told_and_a_dead_builder_frees_the_lock(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = tree(tmp_path / "text")
    directory = tmp_path / "cache"
    directory.mkdir()
    context = mp.get_context("spawn")
    locked = context.Event()
    holder = context.Process(
        target=_hold_lock, args=(directory / f"{cache_key(source, Encoder(ByteTokenizer()))}.lock", locked), daemon=True
    )
    holder.start()
    assert locked.wait(60)
    threading.Timer(0.5, holder.kill).start()
    corpus = open_corpus(source, Encoder(ByteTokenizer()), str(directory), notify_after_s=0.1)
    holder.join(60)
    assert corpus.num_documents == 3
    assert capfd.readouterr().err.count("waiting for another process to tokenise the data") == 1
