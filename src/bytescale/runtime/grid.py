"""Where a rank stands: its stage, HDP rank and tensor-parallel rank, and who its neighbours on each axis are.

    world rank = (stage * hdp_size + hdp_rank) * tp_size + tp_rank

so the TP ranks of an HDP rank are neighbours, on one machine as long as tp_size divides its ranks. Pure numbers.
"""

from dataclasses import dataclass

import numpy as np

from bytescale.arrays import IntArray


@dataclass(frozen=True)
class Grid:
    """All ranks of a run as stages x HDP ranks x TP ranks."""

    pp_size: int
    hdp_size: int
    tp_size: int = 1

    @classmethod
    def of_world(cls, size: int, pp_size: int, tp_size: int) -> "Grid":
        """The grid of `size` ranks, a multiple of pp_size * tp_size."""
        return cls(pp_size, size // (pp_size * tp_size), tp_size)

    @property
    def size(self) -> int:
        return self.pp_size * self.stage_size

    @property
    def stage_size(self) -> int:
        """Ranks of one stage."""
        return self.hdp_size * self.tp_size

    def place(self, rank: int) -> tuple[int, int, int]:
        """(stage, hdp_rank, tp_rank) of a world rank."""
        stage, within = divmod(rank, self.stage_size)
        return stage, *divmod(within, self.tp_size)

    def stages(self) -> IntArray:
        """World ranks as [pp_size, hdp_size, tp_size]."""
        return np.arange(self.size).reshape(self.pp_size, self.hdp_size, self.tp_size)

    def hdp_lines(self) -> IntArray:
        """The HDP ranks of each stage and TP rank, in order: they share states and attention. [pp * tp, hdp_size]."""
        return self.stages().transpose(0, 2, 1).reshape(-1, self.hdp_size)

    def tp_lines(self) -> IntArray:
        """The TP ranks of each HDP rank. [pp * hdp, tp_size]."""
        return self.stages().reshape(-1, self.tp_size)
