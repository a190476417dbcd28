"""The files that a glob names below a directory: each of them once, and a count of everything left out.

One rule for every kind of source. `**` is any number of directories, a name that begins with a dot is taken only by a
part of the pattern that begins with one, and links are followed, to files and to directories alike. Invariants: a file
is taken once, whatever links lead to it, by the name without a link where there is one, so that adding a link renames
nothing; a link back to a directory above it is not followed; whatever matched and is not taken is counted.

Cost: one listing of each directory that can hold a match; a system call for a file only where it is a link.
"""

import os
import re
import stat
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape, has_magic
from pathlib import PurePath
from typing import NamedTuple

from bytescale.errors import UserError

_WORDS = {
    "hidden": ("hidden file or directory", "hidden files or directories"),
    "broken": ("broken link", "broken links"),
    "special": ("entry that is no regular file", "entries that are no regular files"),
    "unreadable": ("directory that cannot be read", "directories that cannot be read"),
    "directory again": ("link to a directory already read", "links to directories already read"),
    "file again": ("second name of a file already read", "second names of files already read"),
}


@dataclass(frozen=True)
class FoundFiles:
    """The result of a search.

    Attributes:
        names: paths relative to the root of the search, with slashes, sorted.
        left_out: what matched and was not taken, as `2 broken links, 1 hidden file or directory`; empty for nothing.
    """

    names: tuple[str, ...]
    left_out: str


class _Directory(NamedTuple):
    """A directory to list: its name below the root, its real path, parts of the pattern that its entries may match."""

    name: str
    real: str
    parts: frozenset[int]
    through_link: bool


def find_files(root: str, pattern: str, unwanted: Collection[str] = (), key: str = "data.glob") -> FoundFiles:
    """Files below `root` whose relative path matches `pattern`; nothing named in `unwanted` is taken or entered.

    Raises:
        UserError: the pattern, which `key` of the configuration gave, cannot be followed.
    """
    prefix, rest = split_glob(pattern)
    parts = _parts(rest)
    if not rest or os.path.isabs(pattern):
        raise UserError(f"{key} = {pattern!r} cannot be used; give a relative pattern such as **/*.txt")
    if ".." in parts:
        raise UserError(f'{key} = {pattern!r} cannot be used; ".." may not follow a wildcard')
    start = os.path.join(root, prefix)
    pending = [_Directory(prefix, os.path.realpath(start), _with_next(frozenset([0]), parts), False)]
    links: deque[_Directory] = deque()
    seen: set[tuple[str, frozenset[int]]] = set()
    found: list[tuple[bool, str, str]] = []
    left_out: Counter[str] = Counter()
    while pending or links:
        # Linked directories come last, so that what can be reached without a link is.
        directory = pending.pop() if pending else links.popleft()
        if (directory.real, directory.parts) in seen:
            left_out["directory again"] += 1
            continue
        seen.add((directory.real, directory.parts))
        for entry in _entries(os.path.join(root, directory.name), left_out):
            if entry.name in unwanted:
                continue
            kind, is_link = _kind(entry), entry.is_symlink()
            ends, goes_on = _match(entry.name, directory.parts, parts)
            if (kind == "directory" and goes_on) or (kind != "directory" and ends):
                name = os.path.join(directory.name, entry.name)
                real = os.path.realpath(entry.path) if is_link else os.path.join(directory.real, entry.name)
                through_link = directory.through_link or is_link
                if kind == "directory":
                    (links if is_link else pending).append(_Directory(name, real, goes_on, through_link))
                elif kind == "file":
                    found.append((through_link, name, real))
                else:
                    left_out[kind] += 1
            elif entry.name.startswith("."):
                ends, goes_on = _match(entry.name.lstrip(".") or "-", directory.parts, parts)
                left_out["hidden"] += bool(goes_on) if kind == "directory" else ends
    names: dict[str, str] = {}
    for _, name, real in sorted(found):
        names.setdefault(real, PurePath(name).as_posix())
    left_out["file again"] = len(found) - len(names)
    return FoundFiles(tuple(sorted(names.values())), _in_words(left_out))


def split_glob(pattern: str) -> tuple[str, str]:
    """The directories that open `pattern` without a wildcard, and the rest of the pattern, which is never empty."""
    parts = PurePath(pattern).parts
    opening: list[str] = []
    for part in parts[:-1]:
        # A wildcard that stands in brackets of its own means itself.
        name = re.sub(r"\[([*?[])\]", r"\1", part)
        if has_magic(name) and escape(name) != part:
            break
        opening.append(name)
    return os.path.join("", *opening), os.path.join("", *parts[len(opening) :])


def _parts(pattern: str) -> tuple[str, ...]:
    """The parts of a pattern, one `**` for several in a row, and a part for files after one that ends it."""
    parts = PurePath(f"{pattern}/*" if pattern.endswith("**") else pattern).parts
    return tuple(part for i, part in enumerate(parts) if not (part == "**" and i and parts[i - 1] == "**"))


def _with_next(active: frozenset[int], parts: tuple[str, ...]) -> frozenset[int]:
    """`**` may also be no directory at all: where it is active, so is the part after it."""
    return active | {i + 1 for i in active if parts[i] == "**"}


def _match(name: str, active: frozenset[int], parts: tuple[str, ...]) -> tuple[bool, frozenset[int]]:
    """Whether `name` ends a match, and the parts that are active inside it, were it a directory."""
    hidden = name.startswith(".")
    ends, goes_on = False, set()
    for i in active:
        if parts[i] == "**":
            goes_on |= set() if hidden else {i}
        elif (not hidden or parts[i].startswith(".")) and fnmatchcase(name, parts[i]):
            ends |= i == len(parts) - 1
            goes_on |= {i + 1} if i < len(parts) - 1 else set()
    return ends, _with_next(frozenset(goes_on), parts)


def _entries(path: str, left_out: Counter[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
    except OSError:
        left_out["unreadable"] += 1
        return []


def _kind(entry: os.DirEntry[str]) -> str:
    """`directory`, `file`, `special` or `broken`: what the entry is, for a link what that leads to."""
    try:
        if not entry.is_symlink():
            is_directory, is_file = entry.is_dir(follow_symlinks=False), entry.is_file(follow_symlinks=False)
        else:
            mode = os.stat(entry.path).st_mode
            is_directory, is_file = stat.S_ISDIR(mode), stat.S_ISREG(mode)
    except OSError:
        return "broken"
    return "directory" if is_directory else "file" if is_file else "special"


def _in_words(left_out: Counter[str]) -> str:
    return ", ".join(f"{n:,} {_WORDS[kind][n != 1]}" for kind in _WORDS if (n := left_out[kind]))
