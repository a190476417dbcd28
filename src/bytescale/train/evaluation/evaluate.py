"""The mean loss over the held-out sequences, on all ranks of a run, at the weights that they have now.

    loss = sum over all ranks and batches of the targets' losses / targets of the set

Every batch is planned as a training batch is, and only its forward runs: no gradients are kept, nothing is offloaded.
Invariant: the run goes on as if nothing had happened: weights, optimizer, order of the data and random numbers stay.

Cost: one gather of the parameters and the forwards; in memory the activations of one layer.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bytescale.data import SequenceOrder, StepSource, prepared_batches
from bytescale.runtime.attention.interface import AttentionKernel
from bytescale.runtime.fsdp import gather, release
from bytescale.runtime.model.decoder import LossModel
from bytescale.runtime.p2p import collective
from bytescale.runtime.world import World
from bytescale.train.agreement import check_same_step
from bytescale.train.evaluation.held_out import HeldOut
from bytescale.train.prepare import Prepared
from bytescale.train.step import compute_loss


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
        loss: mean over the targets of the held-out sequences.
        tokens: how many targets they have.
        sequences: how many sequences they are.
        time_s: how long it took.
    """

    loss: float
    tokens: int
    sequences: int
    time_s: float

    def to_json(self) -> dict[str, Any]:
        """What it adds to the line of its step in `metrics.jsonl`, which knows no NaN and no infinity."""
        loss = self.loss if math.isfinite(self.loss) else None
        return {"eval_loss": loss, "eval_tokens": self.tokens, "eval_time_s": self.time_s}


def evaluate(
    model: LossModel,
    kernel: AttentionKernel,
    world: World,
    prepared: Prepared,
    held_out: HeldOut,
    is_unwanted: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Measure; a collective.

    Args:
        model: sharded, between two steps.
        kernel: computes attention.
        world: the ranks.
        prepared: the run, whose planner places the sequences.
        held_out: what to measure.
        is_unwanted: whether this rank was asked to stop; asked before each batch.

    Returns:
        None when some rank was asked to stop meanwhile.

    Raises:
        CommunicationError: a peer is gone, late, or has another plan.
    """
    begin_s = time.perf_counter()
    order = SequenceOrder(held_out.dataset, 0)
    source = StepSource(held_out.dataset, prepared.config.batch, 0, order, prepared.planner, world.hdp_rank)
    loss_sum = 0.0
    model.eval()
    with collective(world.rank, "evaluation: gathering the parameters"):
        gather(model)
    try:
        for data in prepared_batches(source, held_out.batches):
            with collective(world.rank, f"evaluation: batch {data.step}"):
                check_same_step(world, data)
                if bool(world.all_gather_numbers([float(is_unwanted())]).any()):
                    return None
            loss_sum += compute_loss(model, kernel, world, data)
    finally:
        release(model)
        model.train()
    with collective(world.rank, "evaluation: loss"):
        total = float(world.all_gather_numbers([loss_sum]).sum())
    num_sequences = sum(map(len, held_out.batches))
    return Evaluation(total / held_out.num_targets, held_out.num_targets, num_sequences, time.perf_counter() - begin_s)
