"""Which figures can be reproduced, and how each is computed.

Invariant: a figure is a pure function of the number of batches and the two data files. Cost: as each says.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bytescale.reproduction.figures.beyond import scaling, strategy_table
from bytescale.reproduction.figures.case_study import figure_18, figure_19, figure_20
from bytescale.reproduction.figures.holdout import NUM_FIT_BATCHES, holdout
from bytescale.reproduction.figures.offloading import figure_21
from bytescale.reproduction.figures.small_figures import figure_4, figure_5, figure_6
from bytescale.reproduction.figures.throughput import figure_17
from bytescale.reproduction.rows import Row
from bytescale.reproduction.systems import NUM_BATCHES

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What a figure is given."""

    num_batches: int = NUM_BATCHES
    progress: Progress | None = None


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
        "fig17": Figure("Speedup over static of six models", lambda r: figure_17(r.num_batches, r.progress)),
        "holdout": Figure(
            "Predicted beyond what was fitted", lambda r: holdout(min(r.num_batches, NUM_FIT_BATCHES), r.progress)
        ),
        "fig18": Figure("Case study: one layer, one step, all ranks", lambda r: figure_18(r.num_batches)),
        "fig19": Figure("Busy kernels and ring traffic", lambda r: figure_19(r.num_batches)),
        "fig20": Figure("Ablation", lambda r: figure_20(r.num_batches)),
        "fig21": Figure("Cost of offloading", lambda r: figure_21()),
        "beyond": Figure("All strategies on the same batches", lambda r: strategy_table(progress=r.progress)),
        "scaling": Figure("best and static from 64 to 16,384 ranks", lambda r: scaling(r.progress)),
    }
)
"""Name -> figure, in the order of the page."""
