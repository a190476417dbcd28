"""Small plans and cost models with times that can be computed by hand."""

from collections.abc import Sequence

import numpy as np

from bytescale.cost.model import CostModel, DirectionCost, Link
from bytescale.plan.step_plan import StepPlan, step_plan
from bytescale.plan.zigzag import piece_tokens

FREE = Link(0.0, float("inf"))


def linear_cost(
    *,
    square: float = 0.0,
    backward: float = 2.0,
    link: Link = FREE,
    floor_s: float = 0.0,
    num_layers: int = 1,
    copy_bytes_per_s: float = float("inf"),
) -> CostModel:
    """One second a token forward, `backward` times that backward; `square` seconds a token squared; 1 byte a token."""
    return CostModel(
        name="by hand",
        num_layers=num_layers,
        forward=DirectionCost(square, 1.0, 0.0, 1.0),
        backward=DirectionCost(square * backward, backward, 0.0, 1.0),
        kv_bytes_per_token=1.0,
        activation_bytes_per_token=1.0,
        intra_node=link,
        inter_node=link,
        ring_step_floor_s=floor_s,
        copy_bytes_per_s=copy_bytes_per_s,
    )


def plan_of(
    placements: Sequence[tuple[int, Sequence[tuple[int, int]]]],
    *,
    hdp_size: int,
    pp_size: int = 1,
    num_layers: int = 1,
    ratio: float = 0.0,
) -> StepPlan:
    """A plan from (length, [(rank, micro-batch) of each piece]) per sequence."""
    rows = [
        (number, rank, micro_batch, len(places), index)
        for number, (_, places) in enumerate(placements)
        for index, (rank, micro_batch) in enumerate(places)
    ]
    lengths = np.array([length for length, _ in placements])
    sequence, rank, micro_batch, degree, index = (np.array(column) for column in zip(*rows, strict=True))
    return step_plan(
        strategy="by hand",
        hdp_size=hdp_size,
        pp_size=pp_size,
        tokens_per_rank=int(lengths.sum()),
        num_layers=num_layers,
        lengths=lengths,
        sequence=sequence,
        rank=rank,
        micro_batch=micro_batch,
        tokens=piece_tokens(lengths[sequence], degree, index),
        offload_ratio=ratio,
        cp_degree=degree,
        cp_index=index,
    )
