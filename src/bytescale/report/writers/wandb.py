"""Weights & Biases, offline: one directory a start of the run in `wandb/`, for `wandb sync` to send when you say so.

Whatever the environment says, nothing is sent: the mode is fixed, and reports of errors in wandb itself are off. Only
the metrics and the run's configuration are stored, nothing of the machine, the code or the output.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ERROR_REPORTS = "WANDB_ERROR_REPORTING"


class WandbWriter:
    """Writes one offline run."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        # Read when wandb is imported; there is no other way to turn its reports off.
        os.environ[ERROR_REPORTS] = "false"
        import wandb

        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        self._teardown = wandb.teardown
        self._run = wandb.init(
            mode="offline",
            dir=str(run_dir),
            project="bytescale",
            name=run_dir.name,
            config=dict(config),
            settings=settings,
        )

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Add the numbers of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """End the run, and wandb's own process, which writes the last of it when it ends."""
        self._run.finish()
        self._teardown()


def open_writer(run_dir: Path, config: Mapping[str, Any]) -> WandbWriter:
    """Begin an offline run in `run_dir/wandb`."""
    return WandbWriter(run_dir, config)
