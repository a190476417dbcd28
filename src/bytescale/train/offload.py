"""Offloading in a training run: which tier, where, how much of it; and when `plan.offload = "auto"` offloads.

`auto` follows Eq. 3 of the paper, which needs to know how fast copies are. A profile says so; without one, on CUDA,
nothing is offloaded (`bytescale.runtime.device`). On a CPU without a profile copies share cores with compute, so `auto`
then offloads only in batches that hold a sequence which all ranks together could not hold otherwise.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from bytescale.config.schema import Config
from bytescale.errors import UserError, counted
from bytescale.plan.memory import NUM_RESIDENT_LAYERS
from bytescale.runtime.device import Machine
from bytescale.runtime.model.decoder import LossModel
from bytescale.runtime.offload.disk import DiskTier, check_directory
from bytescale.runtime.offload.offloader import Offloader
from bytescale.runtime.offload.pinned import PinnedTier
from bytescale.runtime.offload.tiers import Tier
from bytescale.runtime.world import World
from bytescale.train.measure.metrics import StepMetrics


def may_offload(config: Config) -> bool:
    """Whether any plan of this run can ask for offloading."""
    return config.plan.offload not in ("off", 0, 0.0)


def check_offloading(config: Config) -> None:
    """Whether the directory can be used, where one is needed.

    Raises:
        UserError: it cannot be written.
    """
    if may_offload(config) and config.offload.dir is not None and config.train.device == "cpu":
        check_directory(Path(config.offload.dir))


def why_nothing_moved(config: Config, metrics: StepMetrics, num_layers: int) -> str | None:
    """One line when the plan of a step asked for offloading and nothing moved; None where there is nothing to say.

    Args:
        config: the run.
        metrics: of the step.
        num_layers: layers of the largest stage.
    """
    if not metrics.nothing_moved:
        return None
    if num_layers <= NUM_RESIDENT_LAYERS:
        reason = f"a rank has {counted(num_layers, 'layer')}, and the last {NUM_RESIDENT_LAYERS} always stay"
    elif metrics.offload_declined_bytes:
        reason = "there is no room in offload.dir, or not within offload.limit_bytes"
    else:
        reason = f"every tensor is smaller than offload.min_bytes = {config.offload.min_bytes}"
    tokens = counted(metrics.offload_asked_tokens, "token", ",")
    return f"warning: step {metrics.step} was planned with {tokens} offloaded, but nothing moved: {reason}"


@contextmanager
def open_offloader(config: Config, model: LossModel, world: World) -> Iterator[Offloader | None]:
    """The offloader of this rank; None when no plan can ask for offloading. The tier opens with the first tensor."""
    if not may_offload(config):
        yield None
        return
    offloader = Offloader(model, lambda: open_tier(config, world.device), config.offload.min_bytes)
    try:
        yield offloader
    finally:
        offloader.close()


def open_tier(config: Config, device: torch.device) -> Tier:
    """The tier of this rank.

    Raises:
        UserError: its directory cannot be used.
    """
    limit = config.offload.limit_bytes
    if device.type == "cuda":
        return PinnedTier(device, _free_host_bytes() // 2 // Machine.here().num_ranks if limit is None else limit)
    directory = Path(config.offload.dir if config.offload.dir is not None else config.run.dir)
    if limit is None:
        try:
            limit = shutil.disk_usage(directory).free // 2 // Machine.here().num_ranks
        except OSError as error:
            raise UserError(f"offload.dir = {directory} cannot be used: {error.strerror}") from None
    return DiskTier(directory, limit)


def _free_host_bytes() -> int:
    """Memory that can still be had, from /proc/meminfo."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
