"""TensorBoard: one event file a start of the run in `tensorboard/`, by TensorBoard's own writer and without TensorFlow.

Every line is in the file when `write` returns, so that a killed run keeps what it reached. The first step of a start
says so in a session log; TensorBoard then drops what an earlier start wrote of the same steps.
"""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


class TensorBoardWriter:
    """Writes one event file."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        # Unbuffered: the record writer hands over whole records.
        self._file = open(directory / name, "wb", buffering=0)  # noqa: SIM115 - closed by `close`
        self._records = RecordWriter(self._file)
        self._has_begun = False
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Add the numbers of a step."""
        if not self._has_begun:
            self._add(Event(wall_time=time_s, step=step, session_log=SessionLog(status=SessionLog.START)))
            self._has_begun = True
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(Event(wall_time=time_s, step=step, summary=Summary(value=scalars)))

    def close(self) -> None:
        """End the file."""
        self._file.close()

    def _add(self, event: Event) -> None:
        self._records.write(event.SerializeToString())


def open_writer(run_dir: Path, config: Mapping[str, Any]) -> TensorBoardWriter:
    """Begin a file in `run_dir/tensorboard`."""
    return TensorBoardWriter(run_dir / "tensorboard")
