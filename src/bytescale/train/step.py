"""One training step of one rank: gather, compute, reduce.

The compute phase runs this rank's micro-batches, as many as the plan gives it, none included; nothing but attention's
P2P happens there. Losses are sums over targets; `reduce` divides by the targets of the global batch once.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch

from bytescale.data import StepData, TokenMicroBatch
from bytescale.plan.order import forward_order, rank_order
from bytescale.runtime.attention.context import AttentionContext
from bytescale.runtime.attention.interface import AttentionKernel
from bytescale.runtime.attention.kept_kv import KeptKv
from bytescale.runtime.attention.work import micro_batch_work
from bytescale.runtime.fsdp import gather, reduce
from bytescale.runtime.model.decoder import LossModel
from bytescale.runtime.offload.offloader import Offloader, OffloadReport
from bytescale.runtime.p2p import collective
from bytescale.runtime.pipeline import StageInput, add_tied_gradients, run_stage
from bytescale.runtime.world import World
from bytescale.train.agreement import check_same_step
from bytescale.train.measure.measurement import StepMeasurement, StepResult

__all__ = ["StepResult", "compute", "compute_loss", "run_step"]


def run_step(
    model: LossModel, kernel: AttentionKernel, world: World, data: StepData, offloader: Offloader | None = None
) -> StepResult:
    """Forward and backward of one global batch; afterwards gradients are reduced shards of the target mean.

    A collective: every rank calls it for every step, with or without work. `offloader` moves away what the plan says;
    without one everything stays, whatever the plan says.

    Raises:
        CommunicationError: a peer is gone, late, or has another plan.
    """
    measured = StepMeasurement(world, data)
    with collective(world.rank, f"step {data.step}: gathering the parameters"):
        check_same_step(world, data)
        gather(model)
    measured.gathered()
    loss_sum = compute(model, kernel, world, data, offloader, measured.operation)
    measured.computed()
    with collective(world.rank, f"step {data.step}: reducing the gradients"):
        reduce(model, kernel, world.comm, data.batch.total_targets)
        if model.is_tied:
            add_tied_gradients(model, world)
    measured.reduced()
    return measured.result(float(loss_sum), offloader.report() if offloader is not None else OffloadReport())


def compute(
    model: LossModel,
    kernel: AttentionKernel,
    world: World,
    data: StepData,
    offloader: Offloader | None,
    on_operation: Callable[[int, int], None],
) -> torch.Tensor:
    """Run this rank's micro-batches, forward and backward; gradients pile up, and nothing but P2P is exchanged.

    Returns:
        The loss summed over this rank's targets.
    """
    if offloader is not None:
        offloader.begin_step()
    kept = KeptKv() if data.plan.layout == "chunks" else None
    inputs = _stage_inputs(kernel, world, data, kept, offloader)
    order = rank_order(data.plan, world.hdp_rank, world.stage)
    loss_sum = run_stage(model, inputs, world, order, on_operation)
    assert not kept, "every chunk lets go of its keys and values in its own backward"
    world.comm.drain()
    if offloader is not None:
        offloader.end_step()
    return loss_sum


@torch.no_grad()
def compute_loss(model: LossModel, kernel: AttentionKernel, world: World, data: StepData) -> float:
    """Run this rank's micro-batches forward; nothing is kept for a backward, and nothing but P2P is exchanged.

    Returns:
        The loss summed over this rank's targets.
    """
    kept = KeptKv() if data.plan.layout == "chunks" else None
    inputs = _stage_inputs(kernel, world, data, kept)

    def forwarded(number: int, _: int) -> None:
        if kept is not None:
            kept.drop_finished(inputs[number].context.work)

    loss_sum = run_stage(model, inputs, world, forward_order(data.plan, world.hdp_rank), forwarded)
    assert not kept, "the last chunk of a sequence lets go of all its keys and values"
    world.comm.drain()
    return float(loss_sum)


def _stage_inputs(
    kernel: AttentionKernel, world: World, data: StepData, kept: KeptKv | None, offloader: Offloader | None = None
) -> list[StageInput]:
    return [
        StageInput(
            *_to_device(tokens, world.device),
            AttentionContext(micro_batch_work(part), kernel, world.comm, kept=kept),
            offloader.micro_batch(part.tokens.tolist(), part.offload_ratio.tolist()) if offloader else nullcontext(),
        )
        for part, tokens in zip(data.share, data.micro_batches, strict=True)
    ]


def _to_device(micro_batch: TokenMicroBatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    columns = (micro_batch.input_ids, micro_batch.labels, micro_batch.position_ids)
    ids, labels, positions = (torch.from_numpy(column).to(device, non_blocking=True) for column in columns)
    return ids, labels, positions
