"""The paper's cluster under each of its six models: layout, cost model, and what a step costs beside its micro-batches.

All models run on one cluster, `--cluster paper` (`resources/paper_cluster.toml`); layouts and the rest stand in
`calibration.toml`, each with its source. Nothing here depends on a data set, a context or a strategy. Cost: one small
file.
"""

import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from bytescale.cost.model import ClusterSpec, CostModel, ModelShape, cost_model
from bytescale.cost.presets import MODELS, cluster_spec
from bytescale.errors import UserError, nearest
from bytescale.simulator.overheads import StepOverheads

CONSTANT_FILES = ("src/bytescale/resources/paper_cluster.toml", "src/bytescale/reproduction/calibration.toml")
"""Where a reader of the repository finds the constants: of the cluster, and of what runs on it."""


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


def constant(name: str) -> float:
    """The value of one constant that all models share; the file gives value, unit and source of each."""
    return float(read_calibration()["common"][name]["value"])


def paper_cluster(name: str, cluster: ClusterSpec | None = None) -> PaperCluster:
    """The paper's cluster, or another `cluster` in its place, with the layout of a model.

    Raises:
        UserError: a model without a layout; names the nearest.
    """
    calibration = read_calibration()
    models, common = calibration["models"], calibration["common"]
    if name not in models:
        raise UserError(f"no calibration for model {name!r}; {nearest(name, models)}")
    own, model = models[name], MODELS[name]
    return PaperCluster(
        model=model,
        tp_size=int(own["tp_size"]),
        pp_size=int(own["pp_size"]),
        hdp_size=int(own["hdp_size"]),
        tokens_per_rank=int(common["tokens_per_rank"]["value"]),
        batch_tokens=int(common["batch_tokens"]["value"]),
        cost=cost_model(model, cluster or cluster_spec("paper"), tp_size=int(own["tp_size"])),
        update_s=float(common["update_s"]["value"]),
    )
