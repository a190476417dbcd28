"""Which checkpoint a run begins from, by its configuration and by what lies in its directories. Needs no torch.

A run that a launcher or torchrun starts again after a failure, which its variable TORCHELASTIC_RESTART_COUNT tells,
goes on from its own newest checkpoint, whatever `checkpoint.resume` says, and from the beginning where it has none. A
run directory is its own when it was last opened below the same launcher: a restarted rank must not take the results of
an earlier run for those of its own first attempt.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytescale.checkpoint.directory import MANIFEST, find_checkpoints
from bytescale.config.schema import Config
from bytescale.errors import UserError
from bytescale.locks import launcher_name, restart_count

CHECKPOINTS, PROCESSES = "checkpoints", "processes.json"


@dataclass(frozen=True)
class Origin:
    """What a run begins from.

    Attributes:
        paths: checkpoints to try, newest first; none is the beginning.
        goes_on: they are of this run directory, whose files are continued.
        is_asked: one was named, so that it is refused when it is damaged.
        may_clear: the run directory holds what this run's own earlier attempt left.
    """

    paths: tuple[Path, ...] = ()
    goes_on: bool = False
    is_asked: bool = False
    may_clear: bool = False


def find_origin(config: Config) -> Origin:
    """What the run of `config` begins from.

    Raises:
        UserError: `checkpoint.resume` names what is no checkpoint and holds none.
    """
    own, word = checkpoint_dir(config), config.checkpoint.resume
    is_restart = restart_count() > 0 and _is_own(Path(config.run.dir))
    if (is_restart or word == "auto") and (found := find_checkpoints(own)):
        return Origin(tuple(found), goes_on=True)
    if word in ("auto", "off"):
        return Origin(may_clear=is_restart)
    path = Path(word)
    if (path / MANIFEST).exists() or re.fullmatch(r"step-\d+", path.name):
        return Origin((path,), path.parent.resolve() == own.resolve(), is_asked=True, may_clear=is_restart)
    for directory in (path, path / CHECKPOINTS):
        if found := find_checkpoints(directory):
            return Origin(tuple(found), directory.resolve() == own.resolve(), may_clear=is_restart)
    raise UserError(
        f"checkpoint.resume = {word} is no checkpoint and holds none; give a directory step-..., a run directory with "
        "checkpoints, auto or off"
    )


def checkpoint_dir(config: Config) -> Path:
    """Where the checkpoints of a run lie."""
    return Path(config.run.dir) / CHECKPOINTS if config.checkpoint.dir is None else Path(config.checkpoint.dir)


def _is_own(run_dir: Path) -> bool:
    try:
        entries: Any = json.loads((run_dir / PROCESSES).read_bytes())
        return bool(entries[0]["launcher"] == launcher_name())
    except (OSError, ValueError, LookupError, TypeError):
        return False
