"""What a reproduction gives: rows of ours beside the paper's.

Invariant: rows carry plain numbers and words, ready for JSON and CSV.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Row:
    """One figure of ours, and the paper's where it has one.

    Attributes:
        figure: e.g. "fig17".
        quantity: what is compared, in words.
        ours, paper: the numbers, in the unit that `quantity` names.
        model, data, context, system: which cell, where they apply.
        extra: further columns.
    """

    figure: str
    quantity: str
    ours: float
    paper: float | None = None
    model: str | None = None
    data: str | None = None
    context: str | None = None
    system: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        return self.ours / self.paper if self.paper else None

    def to_dict(self) -> dict[str, Any]:
        """Keys that apply, then the extra columns."""
        named = {
            "figure": self.figure,
            "quantity": self.quantity,
            "model": self.model,
            "data": self.data,
            "context": self.context,
            "system": self.system,
            "paper": self.paper,
            "ours": self.ours,
            "ratio": self.ratio,
        }
        return {key: value for key, value in named.items() if value is not None} | dict(self.extra)


def geometric_error(rows: list[Row]) -> float:
    """Geometric-mean absolute error: exp(mean |ln(ours / paper)|) - 1, over rows that have both."""
    logs = [abs(float(np.log(row.ratio))) for row in rows if row.ratio]
    return float(np.expm1(np.mean(logs))) if logs else 0.0
