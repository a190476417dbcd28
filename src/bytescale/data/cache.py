"""Tokenised text on disk: made once, memory-mapped by every rank of a node.

An entry is a directory named by its key with `tokens.npy` (all documents one after the other, uint16 when every id
fits, else uint32), `offsets.npy` (int64, document i is tokens[offsets[i]:offsets[i+1]]), `digests.npy` (uint64, of the
contents of each document), for masked sources `mask.npy` (uint8, 1 for targets), and `meta.json` (counts and file
sizes). The key is a digest of what is read, contents, encoder and format version: changed text or another tokenizer is
another entry, a moved or touched file is not.

Invariants: an entry appears complete or not at all (built in a directory of its builder's own, then renamed); one
process builds while the others of its machine wait, where the file system has locks. Where it has none, or they do not
reach another host, both build, the first to finish wins, and neither touches what the other builds or has built: what a
builder left behind goes only when its process is known to be dead, or after a week. An entry whose files do not have
the sizes that it states is built again. Plain `.npy` and JSON, nothing that runs code when read.

Cost: building streams, see `bytescale.data.build`; opening checks every file, see `bytescale.data.digests`,
and maps the tokens.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bytescale.arrays import IntArray
from bytescale.data.build import NpyWriter, shards
from bytescale.data.digests import file_digests, manifest_path
from bytescale.data.documents.held_out import DigestArray
from bytescale.data.encoding.encoder import Encoder
from bytescale.data.sources.source import DocumentSource, content_fingerprint
from bytescale.data.tokenizers import TokenArray
from bytescale.errors import UserError, counted
from bytescale.files import expand_home, sync, write_text_atomically
from bytescale.locks import NOTIFY_AFTER_S, is_gone, locked, machine_name

FORMAT_VERSION = 4
_MASK = "mask.npy"
LEFTOVER_AGE_S = 7 * 24 * 3600.0


@dataclass(frozen=True, eq=False)
class TokenCorpus:
    """Tokenised documents.

    Attributes:
        tokens: all documents one after the other, each with its end token; memory-mapped. Shape [num_tokens].
        offsets: document i is tokens[offsets[i]:offsets[i+1]]. Shape [num_documents + 1].
        digests: of the contents of each document, see `bytescale.data.documents.held_out`. Shape [num_documents].
        mask: 1 for tokens that are targets, 0 for others; None where all are. Shape [num_tokens].
        num_ids: 1 + the largest id.
        num_skipped: documents that were left out because they could not be read or encoded.
        num_frame_tokens: tokens of every document that are not of its text: the end token, and the begin token if any.
        notes: lines for whoever started the run.
    """

    tokens: TokenArray
    offsets: IntArray
    digests: DigestArray
    mask: npt.NDArray[np.uint8] | None = None
    num_ids: int = 0
    num_skipped: int = 0
    num_frame_tokens: int = 1
    notes: tuple[str, ...] = ()

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1


def default_cache_dir() -> Path | None:
    """`bytescale` in the user's cache directory (XDG_CACHE_HOME, else ~/.cache); None for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME") or expand_home("~/.cache")
    return None if base is None else Path(base) / "bytescale"


def cache_key(source: DocumentSource, encoder: Encoder, manifest: Path | None = None) -> str:
    """Name of the entry that holds `source` as `encoder` makes it; `manifest` as for `file_digests`.

    Raises:
        UserError: a file of the source cannot be read.
    """
    contents = content_fingerprint(source, file_digests(source.content_paths, manifest))
    parts = [f"format {FORMAT_VERSION}", contents, encoder.fingerprint]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=20).hexdigest()


def open_corpus(
    source: DocumentSource,
    encoder: Encoder,
    cache_dir: str | None = None,
    notify_after_s: float = NOTIFY_AFTER_S,
    num_workers: int | None = None,
) -> TokenCorpus:
    """The tokens of `source`, from the cache or built into it.

    Args:
        source: the documents.
        encoder: makes the tokens.
        cache_dir: directory of entries; None is `default_cache_dir()`, or one in the temporary directory if need be.
        notify_after_s: a longer wait for another process that builds the same entry is reported on stderr.
        num_workers: processes that tokenise; None is this one.

    Raises:
        UserError: a file of the source is bad, the source holds no document, or the cache cannot be written.
    """
    asked = default_cache_dir() if cache_dir is None else Path(cache_dir)
    problem = "there is no home directory" if asked is None else _why_unusable(asked)
    directory, notes = asked, tuple[str, ...]()
    if cache_dir is None and problem is not None:
        directory = _temporary_cache_dir(problem)
        where = "" if asked is None else f" {asked}"
        notes = (f"no cache directory{where} ({problem}): tokenised data is kept in {directory}; see data.cache_dir",)
    assert directory is not None
    key = cache_key(source, encoder, manifest_path(directory, source.root))
    # A directory that cannot be written may well hold the entry.
    corpus = _load(directory / key) or (asked and _load(asked / key)) or None
    if corpus is None:
        if problem is not None and not notes:
            raise _cannot_keep(directory, problem)
        try:
            with locked(directory / f"{key}.lock", "tokenise the data", notify_after_s):
                # Another process may have built it while this one waited.
                corpus = _load(directory / key) or _rebuild(source, encoder, directory, key, num_workers)
        except OSError as error:
            raise _cannot_keep(directory, error.strerror or str(error)) from None
    return dataclasses.replace(
        corpus, num_frame_tokens=encoder.num_frame_tokens, notes=(*notes, *_skipped(corpus, source))
    )


def _skipped(corpus: TokenCorpus, source: DocumentSource) -> tuple[str, ...]:
    """A line about documents that were left out."""
    if corpus.num_skipped == 0:
        return ()
    skipped = counted(corpus.num_skipped, "document", ",")
    return (f"skipped {skipped} under {source.root} (data.on_error); the first: {corpus.notes[0]}",)


def _cannot_keep(directory: Path, problem: str) -> UserError:
    return UserError(
        f"cannot keep tokenised data in {directory}: {problem}; "
        "set data.cache_dir to a directory with room that can be written"
    )


def _why_unusable(directory: Path) -> str | None:
    """Why nothing can be written to `directory`, which is made where it is absent; None where it can."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _temporary_cache_dir(problem: str) -> Path:
    """This user's cache in the temporary directory, where anybody could have made one of that name before."""
    directory = Path(tempfile.gettempdir()) / f"bytescale-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise UserError(
            f"no cache directory ({problem}), and {directory} is not this user's alone; set data.cache_dir to a "
            "directory that can be written"
        )
    return directory


def _load(entry: Path) -> TokenCorpus | None:
    """The corpus at `entry`; None if it is missing or damaged."""
    try:
        meta = json.loads((entry / "meta.json").read_bytes())
        for name, size_bytes in meta["size_bytes"].items():
            if (entry / name).stat().st_size != size_bytes:
                return None
        tokens = np.load(entry / "tokens.npy", mmap_mode="r", allow_pickle=False)
        offsets = np.load(entry / "offsets.npy", allow_pickle=False)
        digests = np.load(entry / "digests.npy", allow_pickle=False)
        mask = np.load(entry / _MASK, mmap_mode="r", allow_pickle=False) if _MASK in meta["size_bytes"] else None
        counts = (meta["num_tokens"], meta["num_documents"])
        num_ids, num_skipped, failure = int(meta["num_ids"]), int(meta["num_skipped"]), str(meta["failure"])
    except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError):
        return None
    if (
        (len(tokens), len(offsets) - 1) != counts
        or len(digests) != counts[1]
        or offsets[0] != 0
        or offsets[-1] != len(tokens)
    ):
        return None
    return (
        None
        if mask is not None and len(mask) != len(tokens)
        else TokenCorpus(
            tokens=tokens,
            offsets=offsets,
            digests=digests,
            mask=mask,
            num_ids=num_ids,
            num_skipped=num_skipped,
            notes=(failure,) if failure else (),
        )
    )


def _rebuild(
    source: DocumentSource, encoder: Encoder, directory: Path, key: str, num_workers: int | None
) -> TokenCorpus:
    """Build the entry, in place of a damaged one."""
    _clear_leftovers(directory)
    shard_dir = directory / f".{key}.shards"
    temporary = _own_directory(directory, key)
    temporary.mkdir()
    try:
        _build(source, encoder, temporary, shard_dir, num_workers)
        _publish(temporary, directory / key)
    except UserError as error:
        # A file that could not be read may be readable next time; data that is put right has another key.
        if not isinstance(error.__cause__, OSError):
            shutil.rmtree(shard_dir, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    corpus = _load(directory / key)
    if corpus is None:
        raise OSError(f"entry {key} cannot be read back after writing it")
    shutil.rmtree(shard_dir, ignore_errors=True)
    return corpus


def _own_directory(directory: Path, key: str) -> Path:
    """A new name for something unfinished, which says whose it is."""
    return directory / f".{key}.{machine_name()}.{os.getpid()}.{uuid.uuid4().hex[:12]}.tmp"


def _clear_leftovers(directory: Path) -> None:
    """Remove what builders of any entry left that are dead for certain."""
    for path in [*directory.glob(".*.tmp"), *directory.glob(".*.shards")]:
        _, _, *owner = path.name.split(".")
        if len(owner) == 4 and owner[1].isdecimal() and is_gone(owner[0], int(owner[1])):
            shutil.rmtree(path, ignore_errors=True)
            continue
        with contextlib.suppress(OSError):
            changed_s = max(inner.stat().st_mtime for inner in [path, *path.iterdir()])
            if time.time() - changed_s > LEFTOVER_AGE_S:
                shutil.rmtree(path, ignore_errors=True)


def _publish(temporary: Path, entry: Path) -> None:
    """Give what was built its name, unless another builder, whose locks do not reach here, did so first."""
    sync(temporary)
    if _load(entry) is not None:
        return
    if entry.exists():
        aside = _own_directory(entry.parent, entry.name)
        with contextlib.suppress(FileNotFoundError):
            os.rename(entry, aside)
        # What went aside may be the whole entry that another one put there just now; then it goes back.
        with contextlib.suppress(OSError):
            if _load(aside) is not None:
                os.rename(aside, entry)
        shutil.rmtree(aside, ignore_errors=True)
    # Onto an entry that is there a directory cannot be renamed; that entry is as good.
    with contextlib.suppress(OSError):
        os.rename(temporary, entry)
    sync(entry.parent)


def _build(source: DocumentSource, encoder: Encoder, directory: Path, shard_dir: Path, num_workers: int | None) -> None:
    num_tokens = num_documents = num_ids = num_skipped = 0
    failure = ""
    with contextlib.ExitStack() as stack:
        dtypes = {"tokens.npy": encoder.dtype, "offsets.npy": np.dtype("<i8"), "digests.npy": np.dtype("<u8")}
        dtypes |= {_MASK: np.dtype("u1")} if encoder.is_masked else {}
        files = {name: stack.enter_context(NpyWriter(directory / name, dtype)) for name, dtype in dtypes.items()}
        files["offsets.npy"].append(np.zeros(1))
        for shard in shards(source, encoder, shard_dir, num_workers):
            encoded = shard.encoded
            files["tokens.npy"].append(encoded.tokens)
            files["offsets.npy"].append(num_tokens + np.cumsum(encoded.lengths))
            files["digests.npy"].append(encoded.digests)
            if encoded.mask is not None:
                files[_MASK].append(encoded.mask)
            num_tokens += len(encoded.tokens)
            num_documents += len(encoded.lengths)
            num_ids = max(num_ids, int(encoded.tokens.max(initial=0)) + 1)
            num_skipped, failure = num_skipped + encoded.num_skipped, failure or encoded.failure
    if num_documents == 0:
        why = f"; skipped {counted(num_skipped, 'document', ',')}, the first: {failure}" if num_skipped else ""
        raise UserError(
            f'data.source = "{source.kind}" is empty: no document in its {counted(len(source.files), "file")} under '
            f"{source.root}{why}"
        )
    meta = {
        "format": "bytescale-tokens",
        "version": FORMAT_VERSION,
        "source": source.kind,
        "tokenizer": encoder.tokenizer.name,
        "begin_id": encoder.tokenizer.begin_id,
        "end_id": encoder.tokenizer.end_id,
        "num_tokens": num_tokens,
        "num_documents": num_documents,
        "num_ids": num_ids,
        "num_skipped": num_skipped,
        "failure": failure,
        "size_bytes": {name: (directory / name).stat().st_size for name in files},
    }
    write_text_atomically(directory / "meta.json", json.dumps(meta, indent=1))
