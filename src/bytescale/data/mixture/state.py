"""Where a run stands in its data: a few integers a source, which know nothing of ranks.

    state.to_dict()  ->  a JSON value for a checkpoint  ->  LoaderState.from_dict(value)

Invariant: data, seed, `[batch]` and the state decide every batch that follows. Where names or weights of the sources,
or what the weights are shares of, have changed since, each source goes on where it stood, and the new shares count from
here on; a source that is new begins at its beginning.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bytescale.config.data import Mix
from bytescale.data.dataset import SequenceDataset
from bytescale.errors import UserError


@dataclass(frozen=True)
class SourceState:
    """Where one source stands.

    Attributes:
        name: of the source.
        weight: its share of the mixture.
        epoch: how often it was gone through.
        position: the next sequence is number `position` of the order of `epoch`.
        drawn: what it gave since the shares hold, in tokens or sequences, whichever they are shares of.
    """

    name: str = ""
    weight: float = 1.0
    epoch: int = 0
    position: int = 0
    drawn: int = 0


@dataclass(frozen=True)
class LoaderState:
    """Where the loader stands; without sources at the very beginning.

    Attributes:
        sources: one state a source, in the order of the dataset.
        mix: what `SourceState.drawn` counts.
    """

    sources: tuple[SourceState, ...] = ()
    mix: Mix = "tokens"

    def to_dict(self) -> dict[str, Any]:
        """The state as plain values, for a checkpoint."""
        return {"mix": self.mix, "sources": [dataclasses.asdict(source) for source in self.sources]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "LoaderState":
        """The state that `to_dict` wrote."""
        return cls(tuple(SourceState(**source) for source in values["sources"]), values["mix"])

    def of(self, dataset: SequenceDataset) -> "LoaderState":
        """This state for the sources of `dataset`.

        Raises:
            UserError: a source has no sequence where the state stands, so it belongs to other data.
        """
        fresh = [SourceState(source.name, source.weight) for source in dataset.sources]
        known = {state.name: state for state in self.sources}
        same = [(s.name, s.weight) for s in self.sources] == [(s.name, s.weight) for s in fresh]
        if same and self.mix == dataset.mix:
            states: Sequence[SourceState] = self.sources
        else:
            states = [dataclasses.replace(known.get(new.name, new), weight=new.weight, drawn=0) for new in fresh]
        for state, source in zip(states, dataset.sources, strict=True):
            if state.epoch < 0 or not 0 <= state.position < len(source):
                where = f" of source {source.name}" if source.name else ""
                raise UserError(
                    f"the loader stands at sequence {state.position} of epoch {state.epoch}{where}, the data has "
                    f"{len(source)} sequences; resume with the data that the run began with"
                )
        return LoaderState(tuple(states), dataset.mix)
