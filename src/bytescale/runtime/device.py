"""Which device and which type a run computes in: decided from the configuration and facts about the machine, no ranks.

Rules, the same on every rank of a machine:

    train.device   auto: CUDA where every local rank has a GPU of its own, else the CPU; cuda: refused without them
    train.dtype    auto: bfloat16 on CUDA, float32 on the CPU; float32 is refused on CUDA, which has no kernel for it
    plan.offload   auto: off on CUDA without a profile, whose copies have been measured

The facts are a value, so that every rule can be checked on a machine without a GPU.
"""

import os
from dataclasses import dataclass, replace

import torch

from bytescale.config.schema import Config, Device
from bytescale.errors import UserError, counted

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Machine:
    """What decides where a run computes.

    Attributes:
        num_gpus: CUDA devices that this process sees.
        num_ranks: ranks of the run on this machine; each needs a device of its own.
    """

    num_gpus: int
    num_ranks: int

    @classmethod
    def here(cls, world_size: int = 1) -> "Machine":
        """This machine; before ranks are started, all of `world_size` count as its own."""
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return cls(num_gpus, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))

    @property
    def has_gpu_for_every_rank(self) -> bool:
        return self.num_gpus >= self.num_ranks


def choose_device(wanted: Device, machine: Machine) -> Device:
    """`cpu` or `cuda`.

    Raises:
        UserError: CUDA is asked for and a rank would have no GPU.
    """
    if wanted == "auto":
        return "cuda" if machine.has_gpu_for_every_rank else "cpu"
    if wanted == "cuda" and not machine.has_gpu_for_every_rank:
        fewer = f"start {counted(machine.num_gpus, 'rank')} here or " if machine.num_gpus else ""
        raise UserError(
            f'train.device = "cuda" needs a GPU for each of {counted(machine.num_ranks, "rank")}, this machine has '
            f'{machine.num_gpus}; {fewer}set train.device = "cpu"'
        )
    return wanted


def resolve(config: Config, machine: Machine) -> Config:
    """`config` with nothing left open that depends on the machine. Resolving again changes nothing.

    Raises:
        UserError: the machine cannot run what is asked.
    """
    device, dtype = choose_device(config.train.device, machine), config.train.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    elif device == "cuda" and dtype == "float32":
        raise UserError(
            'train.dtype = "float32" has no attention kernel on CUDA; set it to "auto" or "bfloat16", or set '
            'train.device = "cpu"'
        )
    plan = config.plan
    if device == "cuda" and plan.offload == "auto" and plan.profile is None:
        plan = replace(plan, offload="off")
    return replace(config, plan=plan, train=replace(config.train, device=device, dtype=dtype))


def device_note(config: Config, machine: Machine) -> str | None:
    """One line where `auto` leaves GPUs unused; None where there is nothing to say."""
    if config.train.device != "auto" or machine.num_gpus == 0 or machine.has_gpu_for_every_rank:
        return None
    gpus, ranks = counted(machine.num_gpus, "GPU"), counted(machine.num_ranks, "rank")
    return f"on the CPU: {gpus} for {ranks}; to use CUDA start at most {counted(machine.num_gpus, 'rank')} (--nproc)"
