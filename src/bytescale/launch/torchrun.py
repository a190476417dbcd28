"""A rank that torchrun started: what its variables say, and how it leaves its error."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from bytescale.errors import UserError
from bytescale.files import write_text_atomically
from bytescale.launch.failure import Complaint
from bytescale.launch.ranks import CAUSE_PATIENCE_S

VARIABLES = ("RANK", "WORLD_SIZE")


def world_size(environment: Mapping[str, str]) -> int | None:
    """Ranks of the world that the variables of torchrun describe; None where there are none.

    Raises:
        UserError: they are incomplete or not what torchrun sets.
    """
    found = {name: environment[name] for name in VARIABLES if name in environment}
    if not found:
        return None
    missing = [name for name in VARIABLES if name not in found]
    if missing:
        raise UserError(f"{spelled(found)} is set but not {missing[0]}: start with torchrun, or unset {' and '.join(found)}")
    rank, size = found["RANK"], found["WORLD_SIZE"]
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise UserError(f"{spelled(found)} are not what torchrun sets; unset them to start alone")
    return int(size)


def spelled(variables: Mapping[str, str]) -> str:
    """`RANK = 0 and WORLD_SIZE = 2`."""
    return " and ".join(f"{name} = {value}" for name, value in variables.items())


def leave_error(found: Complaint) -> None:
    """Leave `found` for torchrun's own report; a rank that lost a peer waits for the cause to be seen first."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    record = {**asdict(found), "timestamp": int(time.time())}
    try:
        # The agent may end this rank at any moment, and cannot read half a file.
        write_text_atomically(Path(path), json.dumps(record))
    except OSError:
        return
    if found.kind == "peer":
        time.sleep(CAUSE_PATIENCE_S)
