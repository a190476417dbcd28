"""Peak memory of a step: device memory on CUDA, the resident set of the process elsewhere.

On Linux writing "5" to /proc/self/clear_refs resets the peak of the resident set, and VmHWM reads it; where that is not
possible the peak is that of the whole run.
"""

import contextlib
import resource
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak_memory(device: torch.device) -> None:
    """Start a new measurement."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")


def peak_memory_bytes(device: torch.device) -> int:
    """Peak since `reset_peak_memory`."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
