"""The calibrated clusters of the paper: one set of constants per model, from `calibration.toml`, each with its source.

A model's constants are the time of one layer and direction on one rank for 8K tokens (C): everything linear, and one
ring step of 8K keys and values. Attention of a pair of 8K blocks follows from one rate for all models. With C tokens,

    T(s) = attention * (s / C)^2 + linear * (s / C),      ring step = max(attention, transfer, floor).

Nothing here depends on a data set, a context or a strategy. Cost: one small file.
"""

import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from bytescale.cost.model import CostModel, DirectionCost, Link, ModelShape
from bytescale.cost.presets import MODELS
from bytescale.errors import UserError, nearest
from bytescale.simulator.overheads import StepOverheads

CALIBRATION_FILE = "src/bytescale/reproduction/calibration.toml"
"""Where a reader of the repository finds the constants."""

_MS = 1e-3


@dataclass(frozen=True)
class PaperCluster:
    """How the paper's cluster runs one model.

    Attributes:
        model: its shape.
        tp_size, pp_size, hdp_size: the layout; the paper publishes none of them.
        tokens_per_rank: C.
        batch_tokens: tokens of a global batch.
        cost: what pieces cost.
        update_s: what a step costs beside its micro-batches.
    """

    model: ModelShape
    tp_size: int
    pp_size: int
    hdp_size: int
    tokens_per_rank: int
    batch_tokens: int
    cost: CostModel
    update_s: float

    @property
    def overheads(self) -> StepOverheads:
        return StepOverheads(update_s=self.update_s)

    @property
    def num_gpus(self) -> int:
        return self.tp_size * self.pp_size * self.hdp_size


def read_calibration() -> dict[str, Any]:
    """The file as it stands."""
    text = resources.files("bytescale.reproduction").joinpath("calibration.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def constant(table: dict[str, Any], name: str) -> float:
    """The value of one constant; the file gives value, unit and source of each."""
    return float(table[name]["value"])


def paper_cluster(name: str, calibration: dict[str, Any] | None = None) -> PaperCluster:
    """The calibrated cluster of a model.

    Raises:
        UserError: a model without calibration; names the nearest.
    """
    values = read_calibration() if calibration is None else calibration
    models = values["models"]
    if name not in models:
        raise UserError(f"no calibration for model {name!r}; {nearest(name, models)}")
    own, common = models[name], values["common"]
    model = MODELS[name]
    capacity = int(constant(common, "tokens_per_rank"))
    return PaperCluster(
        model=model,
        tp_size=int(own["tp_size"]),
        pp_size=int(own["pp_size"]),
        hdp_size=int(own["hdp_size"]),
        tokens_per_rank=capacity,
        batch_tokens=int(constant(common, "batch_tokens")),
        cost=_cost(model, own, common, capacity),
        update_s=constant(common, "update_s"),
    )


def _cost(model: ModelShape, own: dict[str, Any], common: dict[str, Any], capacity: int) -> CostModel:
    heads = model.num_heads / own["tp_size"]
    square_s = constant(common, "attention_ms_per_head") * heads * _MS / capacity**2
    token_s = own["linear_ms"] * _MS / capacity
    kv_bytes = model.kv_bytes_per_token / own["tp_size"]
    link = Link(0.0, kv_bytes * capacity / (own["transfer_ms"] * _MS))
    attention, linear = constant(common, "backward_attention"), constant(common, "backward_linear")
    return CostModel(
        name=f"{model.name} on the paper's cluster",
        num_layers=model.num_layers,
        forward=DirectionCost(square_s, token_s, 0.0, 1.0),
        backward=DirectionCost(square_s * attention, token_s * linear, 0.0, constant(common, "backward_transfer")),
        kv_bytes_per_token=kv_bytes,
        activation_bytes_per_token=model.activation_bytes_per_token / own["tp_size"],
        intra_node=link,
        inter_node=link,
        ring_step_floor_s=constant(common, "ring_step_floor_ms") * _MS,
        ranks_per_node=8 // own["tp_size"],
        copy_bytes_per_s=constant(common, "copy_gb_per_s") * 1e9,
        provenance="fitted",
    )
