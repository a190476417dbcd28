"""Where a run begins: in the data, in its steps, in its sums; the beginning, or where a checkpoint was taken."""

from dataclasses import dataclass, field
from typing import Any

from bytescale.data import LoaderState
from bytescale.train.resuming.origin import Origin


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        origin: what it could begin from.
        step: the last step that has been made.
        loader: where in the data the next one begins.
        num_skipped_in_a_row: steps before it whose update was left out.
        restarts: how often the run has begun again so far.
        totals: sums over the steps so far, as `RunTotals` stores them; None before the first.
        notes: lines for whoever started the run.
    """

    origin: Origin = field(default_factory=Origin)
    step: int = 0
    loader: LoaderState = field(default_factory=LoaderState)
    num_skipped_in_a_row: int = 0
    restarts: int = 0
    totals: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
