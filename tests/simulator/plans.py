"""Small plans and cost models with times that can be computed by hand."""

from bytescale.cost.model import CostModel, DirectionCost, Link
from bytescale.plan.step_plan import StepPlan
from tests.plans import drawn

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


def one_layer(lengths: str, *ranks: str, **scalars: object) -> StepPlan:
    """`drawn` with a single layer."""
    return drawn(lengths, *ranks, num_layers=1, **scalars)
