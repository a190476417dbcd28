"""Consecutive records of a source, enough of them for one call of a tokenizer: what one worker gets at a time.

Finding chunks is cheap, so one process finds them all, in order; reading the documents of one is not, and needs nothing
but the chunk and the files.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Position(NamedTuple):
    """A place between two records: how many files lie wholly before it, and how many records of the next file."""

    file: int = 0
    record: int = 0


class Limits(NamedTuple):
    """How much a chunk holds at most, but for one record that is larger."""

    num_bytes: int
    num_records: int


@dataclass(frozen=True)
class Chunk:
    """The records from `begin` to `end`.

    Attributes:
        lines: the records themselves, where the file is read line by line.
        failure: why nothing more of the file after them can be read.
    """

    begin: Position
    end: Position
    lines: tuple[bytes, ...] = ()
    failure: str | None = None
