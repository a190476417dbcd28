"""A directory that is replaced whole: whenever the process is killed, either the old one or the new one is there.

The new directory is filled under a hidden name beside the target, brought to the disk, and exchanged with the target in
one call of the kernel (renameat2, RENAME_EXCHANGE). A file system that cannot exchange takes three renames, whose order
a later start can read: only a directory that is whole is ever called `.NAME.whole`, and `.NAME.old` is whole as long as
there is no NAME.

    .NAME.new -> .NAME.whole,  NAME -> .NAME.old,  .NAME.whole -> NAME,  then .NAME.old is removed

Cost: one pass over the new files to bring them to the disk.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bytescale.errors import RunError
from bytescale.files import exchange, sync, sync_tree


def under_way(target: Path) -> Path:
    """Where the next `target` is filled."""
    return target.with_name(f".{target.name}.new")


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """An empty directory to fill, which takes the place of `target` at the end of the block; not if the block fails.

    One process at a time may replace a target.

    Raises:
        RunError: `target` is something that must not be replaced; what was written stays.
    """
    new = under_way(target)
    recover(target)
    new.mkdir(parents=True)
    try:
        yield new
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    replace_directory(new, target)


def replace_directory(new: Path, target: Path) -> None:
    """Put the directory `new`, which lies beside `target`, in its place."""
    if not may_replace(target):
        raise RunError(f"{target} is not a checkpoint and is not replaced; the model is left in {new}")
    sync_tree(new)
    if not target.exists():
        os.rename(new, target)
        sync(target.parent)
    elif exchange(new, target):
        sync(target.parent)
        shutil.rmtree(new, ignore_errors=True)
    else:
        os.rename(new, _whole(target))
        sync(target.parent)
        recover(target)


def recover(target: Path) -> None:
    """Finish a replacement that was interrupted, or undo it, and remove what it left behind."""
    whole, old = _whole(target), _old(target)
    if whole.exists():
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(target, old)
            sync(target.parent)
        os.rename(whole, target)
        sync(target.parent)
    elif old.exists() and not target.exists():
        os.rename(old, target)
        sync(target.parent)
    for leftover in (old, under_way(target)):
        shutil.rmtree(leftover, ignore_errors=True)


def is_interrupted(target: Path) -> bool:
    """Whether `recover` has something to do."""
    return any(path.exists() for path in (_whole(target), _old(target), under_way(target)))


def may_replace(model: Path) -> bool:
    """Whether `model` is absent, an empty directory or a checkpoint."""
    if not model.is_dir() or model.is_symlink():
        return not os.path.lexists(model)
    return (model / "config.json").is_file() or not any(model.iterdir())


def _whole(target: Path) -> Path:
    return target.with_name(f".{target.name}.whole")


def _old(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")
