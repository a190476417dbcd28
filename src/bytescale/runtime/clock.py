"""Points in time on the device that computes, noted without waiting and read once it has got there.

On the CPU a point is a reading of `perf_counter_ns`. On CUDA it is an event on the stream, so that the host may run
ahead; one wait, in `settle`, ties all of them to the host's clock.
"""

import time
from typing import Any, Protocol

import torch


class Marker(Protocol):
    """Points in time on the device that computes."""

    def mark(self) -> Any:
        """Now, without waiting."""
        ...

    def settle(self) -> None:
        """Wait until the device has passed every mark, before `at_ns` is asked for them."""
        ...

    def at_ns(self, mark: Any) -> int:
        """A mark as `perf_counter_ns` counts."""
        ...


class HostMarker:
    """Marks of the host's clock."""

    def mark(self) -> int:
        return time.perf_counter_ns()

    def settle(self) -> None:
        """Nothing to wait for."""

    def at_ns(self, mark: int) -> int:
        return mark


class CudaMarker:
    """Events on the current stream, read backwards from a point that the host knows. Has not run on a GPU yet."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._end: Any = None
        self._end_ns = 0

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        self._end = self.mark()
        self._end.synchronize()
        self._end_ns = time.perf_counter_ns()

    def at_ns(self, mark: Any) -> int:
        return self._end_ns - round(float(mark.elapsed_time(self._end)) * 1e6)


def marker_for(device: torch.device) -> Marker:
    """The clock of `device`."""
    return CudaMarker(device) if device.type == "cuda" else HostMarker()
