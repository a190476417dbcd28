"""One training step of one rank: gather, compute, reduce.

The compute phase runs this rank's micro-batches, as many as the plan gives it, none included; nothing but attention's
P2P happens there. Losses are sums over targets; `reduce` divides by the targets of the global batch once.
"""

import hashlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from bytescale.data import StepData, TokenMicroBatch
from bytescale.errors import CommunicationError
from bytescale.plan.order import FORWARD, rank_order
from bytescale.plan.step_plan import StepPlan
from bytescale.runtime.attention.kept_kv import KeptKv
from bytescale.runtime.attention.kernels import AttentionKernel
from bytescale.runtime.attention.ring import AttentionContext
from bytescale.runtime.attention.work import attention_work, local_work
from bytescale.runtime.fsdp import gather, reduce
from bytescale.runtime.model.decoder import LossModel
from bytescale.runtime.offload.offloader import Offloader, OffloadReport
from bytescale.runtime.p2p import collective
from bytescale.runtime.pipeline import StageInput, add_tied_gradients, run_stage
from bytescale.runtime.world import World
from bytescale.trace import Span, span_between


@dataclass(frozen=True)
class StepResult:
    """What one rank did in one step.

    Attributes:
        loss_sum: loss summed over this rank's targets.
        compute_s: the compute phase, everything included.
        busy_s: compute phase without waiting for other ranks.
        pipeline_wait_s: time in the compute phase that other stages were waited for.
        bytes_sent: by attention.
        offload: what was offloaded.
        spans: timeline, nanoseconds as `time.perf_counter_ns` counts them.
    """

    loss_sum: float
    compute_s: float
    busy_s: float
    pipeline_wait_s: float
    bytes_sent: int
    spans: tuple[Span, ...]
    offload: OffloadReport = field(default_factory=OffloadReport)


class _Timeline:
    """Spans of this rank, one after the other."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.spans: list[Span] = []
        self.mark_ns = time.perf_counter_ns()

    def lap(self, name: str, category: str) -> None:
        """Close a span that began where the last one ended."""
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        begin_ns, self.mark_ns = self.mark_ns, time.perf_counter_ns()
        self.spans.append(Span(name, category, begin_ns, self.mark_ns - begin_ns, self.world.rank))

    def operation(self, number: int, direction: int) -> None:
        """Close the span of one operation of the schedule."""
        category = "forward" if direction == FORWARD else "backward"
        self.lap(f"{category} micro-batch {number}", category)


def run_step(
    model: LossModel, kernel: AttentionKernel, world: World, data: StepData, offloader: Offloader | None = None
) -> StepResult:
    """Forward and backward of one global batch; afterwards gradients are reduced shards of the target mean.

    A collective: every rank calls it for every step, with or without work. `offloader` moves away what the plan says;
    without one everything stays, whatever the plan says.

    Raises:
        CommunicationError: a peer is gone, late, or has another plan.
    """
    for link in (world.comm, *world.pipe):
        link.reset_counters()
    timeline = _Timeline(world)
    with collective(world.rank, f"step {data.step}: gathering the parameters"):
        check_same_plan(world, data)
        gather(model)
    if offloader is not None:
        offloader.begin_step()
    timeline.lap("gather", "gather")
    begin_s = time.perf_counter()
    kept = KeptKv() if data.plan.layout == "chunks" else None
    inputs = _stage_inputs(kernel, world, data, offloader, kept)
    order = rank_order(data.plan, world.hdp_rank, world.stage)
    loss_sum = run_stage(model, inputs, world, order, timeline.operation)
    assert not kept, "every chunk lets go of its keys and values in its own backward"
    compute_s = time.perf_counter() - begin_s
    world.comm.drain()
    offloaded = offloader.end_step() if offloader is not None else OffloadReport()
    timeline.lap("drain", "wait")
    with collective(world.rank, f"step {data.step}: reducing the gradients"):
        reduce(model, AttentionContext(local_work([1]), kernel, world.comm), data.batch.total_targets)
        if model.is_tied:
            add_tied_gradients(model, world)
    timeline.lap("reduce", "reduce")
    attention_waits, pipeline_waits = world.comm.waits(), [wait for link in world.pipe for wait in link.waits()]
    pipeline_wait_s = sum(wait.duration_s for wait in pipeline_waits)
    wait_s = pipeline_wait_s + sum(wait.duration_s for wait in attention_waits)
    waits = [
        span_between(f"wait {w.what}", "wait", w.begin_s, w.begin_s + w.duration_s, world.rank, f"{w.what} wait")
        for w in (*attention_waits, *pipeline_waits)
    ]
    return StepResult(
        loss_sum=float(loss_sum),
        compute_s=compute_s,
        busy_s=compute_s - wait_s,
        pipeline_wait_s=pipeline_wait_s,
        bytes_sent=world.comm.bytes_sent,
        spans=(*timeline.spans, *waits, *_offload_spans(offloaded, world.rank)),
        offload=offloaded,
    )


def _stage_inputs(
    kernel: AttentionKernel, world: World, data: StepData, offloader: Offloader | None, kept: KeptKv | None
) -> list[StageInput]:
    """The micro-batches of this pipeline, as this stage needs them."""
    work = attention_work(data.plan, world.hdp_rank)
    leaving = _leaving(offloader, data.plan, world.hdp_rank)
    return [
        StageInput(
            *_to_device(tokens, world.device), AttentionContext(micro_batch_work, kernel, world.comm, kept=kept), leave
        )
        for tokens, micro_batch_work, leave in zip(data.micro_batches, work, leaving, strict=True)
    ]


def _leaving(offloader: Offloader | None, plan: StepPlan, rank: int) -> Iterator[AbstractContextManager[None]]:
    """What surrounds the forward of each micro-batch of `rank`."""
    for rows in plan.micro_batch_rows(rank):
        if offloader is None:
            yield nullcontext()
        else:
            yield offloader.micro_batch(plan.pieces.tokens[rows].tolist(), plan.pieces.offload_ratio[rows].tolist())


def _offload_spans(report: OffloadReport, rank: int) -> list[Span]:
    """One track a direction, and one for the time that compute waited."""
    return [
        *(
            span_between(
                f"{copy.num_bytes / 2**20:.1f} MiB {copy.direction}",
                "offload",
                copy.begin_s,
                copy.begin_s + copy.duration_s,
                rank,
                f"offload {copy.direction}",
            )
            for copy in report.copies
        ),
        *(
            span_between("wait copy", "wait", begin_s, begin_s + wait_s, rank, "offload wait")
            for begin_s, wait_s in report.waits
        ),
    ]


def _to_device(micro_batch: TokenMicroBatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    columns = (micro_batch.input_ids, micro_batch.labels, micro_batch.position_ids)
    ids, labels, positions = (torch.from_numpy(column).to(device, non_blocking=True) for column in columns)
    return ids, labels, positions


def check_same_plan(world: World, data: StepData) -> None:
    """Prove that all ranks are about to run the same plan; a collective of one number.

    Raises:
        CommunicationError: names a rank with another plan. Running on would hang or mix up sequences.
    """
    digest = plan_digest(data.plan)
    digests = torch.empty(world.size, dtype=torch.int64)
    own = torch.tensor([digest], dtype=torch.int64)
    dist.all_gather_single(digests, own, group=world.everyone)
    for rank, other in enumerate(digests.tolist()):
        if other != digests[0]:
            raise CommunicationError(
                f"rank {world.rank}: step {data.step}: rank {rank} made another plan than rank 0; the ranks must see "
                "the same data, configuration and version"
            )


def plan_digest(plan: StepPlan) -> int:
    """A 63-bit fingerprint of everything in a plan that decides what is sent to whom."""
    pieces = plan.pieces
    hasher = hashlib.blake2b(plan.hdp_size.to_bytes(8, "little"), digest_size=8)
    columns = (pieces.sequence, pieces.rank, pieces.micro_batch, pieces.cp_degree, pieces.cp_index, pieces.token_begin)
    for column in (plan.lengths, *columns):
        if column is not None:
            hasher.update(column.data)
    return int.from_bytes(hasher.digest(), "little") >> 1
