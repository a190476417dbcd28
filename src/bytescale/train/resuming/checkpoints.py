"""The checkpoints of a run: when they are due, what they hold, and how it is told.

One is due after every `checkpoint.every` steps and after the last one: that of the run or of the data, or one in which
a signal asked the run to end; that one is waited for. It is taken after the step's line in `metrics.jsonl`, which is
brought to the disk before the checkpoint is published: a run that goes on finds the lines of all steps before it.
"""

import signal
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from bytescale.checkpoint.slices import model_slices, optimizer_slices
from bytescale.checkpoint.writer import CheckpointWriter
from bytescale.config.schema import Config
from bytescale.data import StepData
from bytescale.runtime.model.decoder import LossModel
from bytescale.runtime.world import World
from bytescale.train.measure.metrics import Agreed
from bytescale.train.prepare import Prepared
from bytescale.train.reporter import Reporter
from bytescale.train.resuming.facts import made_by
from bytescale.train.resuming.origin import checkpoint_dir


class Checkpoints:
    """Takes the checkpoints of one rank; does nothing where none are configured."""

    def __init__(
        self,
        config: Config,
        prepared: Prepared,
        world: World,
        store: Store,
        model: LossModel,
        optimizer: torch.optim.Optimizer,
        reporter: Reporter | None,
    ) -> None:
        """Nothing is written yet.

        Args:
            config, prepared: the run.
            world: the ranks.
            store: where they met; a connection that nobody else uses.
            model, optimizer: what is stored.
            reporter: on rank 0.
        """
        self._config, self._reporter = config, reporter
        self._model, self._optimizer = model, optimizer
        self._unsaved: tuple[StepData, Agreed] | None = None
        self._made_by = made_by(config, prepared, world.size) if config.checkpoint.every is not None else {}
        self._writer = CheckpointWriter(
            checkpoint_dir(config),
            world.rank,
            world.size,
            PrefixStore("checkpoints", store),
            keep=config.checkpoint.keep,
            timeout_s=config.run.comm_timeout_s,
            in_background=config.checkpoint.async_,
        )

    def after(self, data: StepData, agreed: Agreed) -> None:
        """A step has ended; every rank calls it after every step."""
        every = self._config.checkpoint.every
        if every is None or agreed.failure(self._config.train) is not None:
            self._unsaved = None
            return
        self._unsaved = data, agreed
        if agreed.step % every == 0:
            self._save(data, agreed)
        self._tell()

    def answer(self, agreed: Agreed) -> bool:
        """Whether a checkpoint is all that a scheduler's signal asks for; ranks other than 0 trust that it is there."""
        is_whole = self._reporter is None or self._reporter.last_saved == agreed.step
        return self._config.checkpoint.every is not None and agreed.signal_number != signal.SIGINT and is_whole

    def close(self) -> None:
        """No step follows: store the last one, and wait for it."""
        if self._unsaved is not None:
            self._save(*self._unsaved)
        self._writer.wait()
        self._tell()

    def _save(self, data: StepData, agreed: Agreed) -> None:
        self._unsaved = None
        reporter = self._reporter
        values: dict[str, Any] = {
            "step": agreed.step,
            "loader": data.state_after.to_dict(),
            "num_skipped_in_a_row": agreed.num_skipped_in_a_row,
            "restarts": reporter.restarts if reporter is not None else None,
            "totals": reporter.totals() if reporter is not None else None,
            "is_tied": self._model.is_tied,
            "made_by": self._made_by,
        }
        slices = model_slices(self._model) + optimizer_slices(self._model, self._optimizer)
        before = reporter.bring_to_disk if reporter is not None else lambda: None
        waited_s = self._writer.save(agreed.step, slices, values, before)
        if reporter is not None:
            reporter.waited_for_checkpoint(waited_s)

    def _tell(self) -> None:
        for saved in self._writer.ended():
            if self._reporter is not None:
                self._reporter.checkpoint(saved)
