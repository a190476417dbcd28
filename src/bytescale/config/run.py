"""Where a run writes and what it can be resumed from: the sections that no result depends on."""

from dataclasses import dataclass
from typing import Literal

from bytescale.config.fields import path_field, require, require_at_least, require_choice, unit_field

Writer = Literal["tensorboard", "wandb"]

MAX_COMM_TIMEOUT_S = 30 * 24 * 3600
"""Far above any real wait, and within what the communication libraries can count."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What a run can be resumed from. Without `every` no checkpoint is written."""

    every: int | None = None
    """steps between checkpoints; one follows the last step and a request to stop in any case. Without it none is
    written"""

    keep: int = 2
    """newest checkpoints that stay"""

    dir: str | None = path_field()
    """directory of the checkpoints, on a disk that all hosts share"""

    async_: bool = True
    """write on a thread while training goes on; a step then waits for a copy in host memory alone"""

    resume: str = path_field("off", words=("auto", "off"))
    """`auto`: go on from the newest sound checkpoint in `checkpoint.dir`, or begin where there is none; a checkpoint,
    or a run directory, to go on from; `off`"""

    def __post_init__(self) -> None:
        require_at_least("checkpoint.every", self.every, 1)
        require_at_least("checkpoint.keep", self.keep, 1)


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
