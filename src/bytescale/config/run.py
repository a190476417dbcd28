"""Where a run writes: the sections of its configuration that no result depends on."""

from dataclasses import dataclass
from typing import Literal

from bytescale.config.fields import path_field, require, require_choice, unit_field

Writer = Literal["tensorboard", "wandb"]

MAX_COMM_TIMEOUT_S = 30 * 24 * 3600
"""Far above any real wait, and within what the communication libraries can count."""


@dataclass(frozen=True)
class RunConfig:
    """Where a run writes, and how long a rank waits for another before it gives up."""

    dir: str = path_field("runs/default")
    """run directory"""

    overwrite: bool = False
    """replace the results of an earlier run in `run.dir`, all of them, its model included; otherwise a directory that
    holds some is refused"""

    save_model: bool = True
    """write the trained model to `model/` in the run directory"""

    writers: tuple[Writer, ...] = ()
    """where metrics go besides `metrics.jsonl`: `tensorboard`, `wandb` (offline), into directories of these names in
    the run directory; each needs the extra of its name"""

    comm_timeout_s: float = unit_field("seconds", 600.0)
    """how long a rank waits for another before it gives up; while ranks prepare, how long one may be silent"""

    def __post_init__(self) -> None:
        for writer in self.writers:
            require_choice("run.writers", writer, Writer)
        require(len(set(self.writers)) == len(self.writers), f"run.writers names one twice: {', '.join(self.writers)}")
        require(
            0 < self.comm_timeout_s <= MAX_COMM_TIMEOUT_S,
            f"run.comm_timeout_s = {self.comm_timeout_s}; it must be above 0 and at most {MAX_COMM_TIMEOUT_S}",
        )
