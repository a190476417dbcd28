"""Which figures can be reproduced, and how each is computed.

Invariant: a figure is a pure function of the number of batches and the two data files. Cost: as each says.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bytescale.reproduction.figures.beyond import scaling, strategy_table
from bytescale.reproduction.figures.case_study import figure_18, figure_19, figure_20
from bytescale.reproduction.figures.fused_loss import figure_16
from bytescale.reproduction.figures.holdout import NUM_FIT_BATCHES, holdout
from bytescale.reproduction.figures.labels import label_table
from bytescale.reproduction.figures.offload_rules import offload_table
from bytescale.reproduction.figures.offloading import figure_21
from bytescale.reproduction.figures.small_figures import figure_4, figure_5, figure_6
from bytescale.reproduction.figures.throughput import figure_17
from bytescale.reproduction.figures.timelines import figure_18b
from bytescale.reproduction.figures.worked_examples import figure_12, figure_13
from bytescale.reproduction.pool import Progress
from bytescale.reproduction.rows import Row
from bytescale.reproduction.systems import NUM_BATCHES


@dataclass(frozen=True)
class Request:
    """What a figure is given."""

    num_batches: int = NUM_BATCHES
    progress: Progress = None
    jobs: int = 1


@dataclass(frozen=True)
class Figure:
    """One figure: a title and its computation."""

    title: str
    rows: Callable[[Request], list[Row]]


FIGURES: Mapping[str, Figure] = MappingProxyType(
    {
        "fig4": Figure("Sequence lengths of the two data sets", lambda r: figure_4()),
        "fig5": Figure("Bubbles of unequal micro-batches", lambda r: figure_5()),
        "fig6": Figure("Attention share over length; random packing", lambda r: figure_6()),
        "fig12": Figure("Two pipelines of unequal micro-batches that end together", lambda r: figure_12()),
        "fig13": Figure("Levels of length under DP-Balance and PP-Balance", lambda r: figure_13()),
        "fig16": Figure("Bytes of a fused cross-entropy", lambda r: figure_16()),
        "fig17": Figure("Speedup over static of six models", lambda r: figure_17(r.num_batches, r.progress, r.jobs)),
        "holdout": Figure(
            "Predicted beyond what was fitted",
            lambda r: holdout(min(r.num_batches, NUM_FIT_BATCHES), r.progress, r.jobs),
        ),
        "fig18": Figure("Case study: one layer, one step, all ranks", lambda r: figure_18(r.num_batches)),
        "fig18b": Figure("Case study: micro-batches of single ranks", lambda r: figure_18b(r.num_batches)),
        "fig19": Figure("Busy kernels and ring traffic", lambda r: figure_19(r.num_batches)),
        "fig20": Figure("Ablation", lambda r: figure_20(r.num_batches)),
        "offload": Figure(
            "The offload step under each rule", lambda r: offload_table(min(r.num_batches, 6), r.progress, r.jobs)
        ),
        "fig21": Figure("Cost of offloading", lambda r: figure_21()),
        "labels": Figure(
            "Byted with the labels of Fig. 4", lambda r: label_table(min(r.num_batches, 4), r.progress, r.jobs)
        ),
        "beyond": Figure(
            "All strategies on the same batches", lambda r: strategy_table(progress=r.progress, jobs=r.jobs)
        ),
        "scaling": Figure("best and static from 64 to 16,384 ranks", lambda r: scaling(r.progress, r.jobs)),
    }
)
"""Name -> figure, in the order of the page."""
