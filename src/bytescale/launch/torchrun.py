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

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


def world_size(environment: Mapping[str, str], nproc: int | None = None) -> int | None:
    """Ranks of the world that torchrun's variables describe; None where there are none.

    Args:
        environment: variables of this process.
        nproc: local ranks that were asked for; together with torchrun's variables that is one launcher too many.

    Raises:
        UserError: the variables are incomplete or not what torchrun sets, or come with `nproc`, or `nproc` is not one.
    """
    if nproc is not None and nproc < 1:
        raise UserError(f"--nproc {nproc}: at least 1 rank is needed")
    found = {name: environment[name] for name in _NEEDED[:2] if name in environment}
    if not found:
        return None
    if nproc is not None:
        raise UserError(
            f"--nproc {nproc} starts ranks, but {_are_set(found)}, which says that this process is a rank: unset "
            f"{' and '.join(found)}, or use torchrun --nproc-per-node {nproc} -m bytescale train without --nproc"
        )
    for name in _NUMBERS:
        if not environment.get(name, "0").isdecimal():
            raise UserError(f"{name} = {environment[name]} is not a number; torchrun sets it, unset it to start alone")
    missing = [name for name in _NEEDED if name not in environment]
    if missing:
        raise UserError(
            f"{_are_set(found)}, but not {' and '.join(missing)}: start with torchrun, which sets them all, or unset "
            f"{' and '.join(found)} to start alone"
        )
    rank, size = int(found["RANK"]), int(found["WORLD_SIZE"])
    if rank >= size:
        raise UserError(f"{_are_set(found)}: ranks count from 0 to {size - 1}; unset them to start alone")
    return size


def _are_set(variables: Mapping[str, str]) -> str:
    """`RANK = 0 and WORLD_SIZE = 2 are set`."""
    words = " and ".join(f"{name} = {value}" for name, value in variables.items())
    return words + (" is set" if len(variables) == 1 else " are set")


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
