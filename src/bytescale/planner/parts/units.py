"""Units of a batch: long sequences alone on their ranks, short ones in packs; each is one micro-batch.

Long units come first, in order of their sequences, then packs. Cost: O(n log n), numpy.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from bytescale.arrays import FloatArray, IntArray
from bytescale.plan.step_plan import StepPlan
from bytescale.planner.parts.degrees import micro_batch_s, sequence_time_s, stage_time_s
from bytescale.planner.parts.packing import best_fit
from bytescale.planner.parts.rows import Placed, plan_of_units
from bytescale.planner.problem import Problem


@dataclass(frozen=True)
class Units:
    """Units, and what each takes.

    Attributes:
        of_sequence: unit of each sequence. Shape [num_sequences].
        degree, time_s: ranks of each unit, and its time on each of them. Shape [num_units].
        num_long: units before this are long sequences, from it on packs.
        offload_ratio: of each sequence. Shape [num_sequences].
    """

    of_sequence: IntArray
    degree: IntArray
    time_s: FloatArray
    num_long: int
    offload_ratio: FloatArray

    @property
    def num_packs(self) -> int:
        return len(self.degree) - self.num_long

    def plan(self, problem: Problem, strategy: str, placed: Placed) -> StepPlan:
        """The plan in which the units run where `placed` says."""
        columns: dict[str, Any] = {"unit": self.of_sequence, "degree": self.degree, "placed": placed}
        return plan_of_units(problem, strategy, **columns, offload_ratio=self.offload_ratio)


def units_of(problem: Problem, degree: IntArray, offload_ratio: FloatArray, pack_tokens: int) -> Units:
    """The units at given degrees: what has one rank and is shorter than `pack_tokens` is packed by best fit."""
    lengths = problem.lengths
    alone = (degree > 1) | (lengths >= pack_tokens)
    long, short = np.flatnonzero(alone), np.flatnonzero(~alone)
    pack = best_fit(lengths[short], pack_tokens)
    long_s = stage_time_s(problem, lengths[long], degree[long], offload_ratio[long])
    short_s = sequence_time_s(problem, lengths[short], np.ones_like(short), offload_ratio[short])
    pack_s = np.bincount(pack, weights=short_s) + micro_batch_s(problem)
    of_sequence = np.zeros(len(lengths), dtype=np.int64)
    of_sequence[long], of_sequence[short] = np.arange(len(long)), len(long) + pack
    return Units(
        of_sequence,
        np.append(degree[long], np.ones(len(pack_s), np.int64)),
        np.append(long_s, pack_s),
        len(long),
        offload_ratio,
    )
