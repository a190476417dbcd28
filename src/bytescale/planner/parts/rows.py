"""From decisions to columns: expand (sequence, degree, ranks, micro-batch) into the rows of a plan.

A strategy decides per sequence; this module writes one row per piece, vectorised. Invariant: pieces of a sequence take
consecutive cp_index in the order of the ranks given. Cost: O(pieces).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from bytescale.arrays import IntArray, exclusive_sum
from bytescale.plan.step_plan import StepPlan, step_plan
from bytescale.plan.zigzag import piece_tokens
from bytescale.planner.problem import Problem


def spread(counts: IntArray) -> tuple[IntArray, IntArray]:
    """For items with `counts` rows each: the item of every row and the row's position inside its item."""
    item = np.repeat(np.arange(len(counts)), counts)
    first = exclusive_sum(counts)
    return item, np.arange(len(item)) - first[item]


@dataclass(frozen=True)
class Placed:
    """Where units run; a unit is a micro-batch on all its ranks.

    Attributes:
        ranks, micro_batches: rank and micro-batch of every member, grouped by unit. Shape [sum(degree)].
        counts: micro-batches of every rank. Shape [hdp_size].
    """

    ranks: IntArray
    micro_batches: IntArray
    counts: IntArray


def plan_of_units(
    problem: Problem,
    strategy: str,
    *,
    unit: IntArray,
    degree: IntArray,
    placed: Placed,
    offload_ratio: Any = 0.0,
) -> StepPlan:
    """The plan in which sequences that share a unit share a micro-batch on all ranks of that unit.

    Args:
        problem: what was asked.
        strategy: name that the plan carries.
        unit: of each sequence. Shape [num_sequences].
        degree: ranks of each unit.
        placed: where the units run.
        offload_ratio: per sequence or one for all.
    """
    first = exclusive_sum(degree)
    item, index = spread(degree[unit])
    member = first[unit][item] + index
    return plan_of_groups(
        problem,
        strategy,
        sequence=np.arange(problem.num_sequences),
        degree=degree[unit],
        ranks=placed.ranks[member],
        micro_batches=placed.micro_batches[member],
        offload_ratio=offload_ratio,
    )


def plan_of_groups(
    problem: Problem,
    strategy: str,
    *,
    sequence: IntArray,
    degree: IntArray,
    ranks: IntArray,
    micro_batches: IntArray,
    offload_ratio: Any = 0.0,
    chunk: tuple[IntArray, IntArray] | None = None,
    kept_gradient_share: float = 0.0,
) -> StepPlan:
    """The plan in which `sequence[i]` runs at `degree[i]`.

    Args:
        problem: what was asked.
        strategy: name that the plan carries.
        sequence: sequence numbers, each once, or once a chunk. Shape [n].
        degree: cp_degree of each. Shape [n].
        ranks: rank of every piece, grouped by sequence in the order given, cp_index ascending. Shape [sum(degree)].
        micro_batches: micro-batch of every piece, in the same order.
        offload_ratio: per sequence (shape [n]) or one for all.
        chunk: first and end token of each chunk (shape [n] both); None runs sequences whole.
        kept_gradient_share: see `StepPlan`.
    """
    item, index = spread(degree)
    rows = sequence[item]
    length = problem.lengths[rows]
    columns: dict[str, Any] = {}
    if chunk is not None:
        begin, end = chunk[0][item], chunk[1][item]
        length, columns = end - begin, {"token_begin": begin, "token_end": end}
    ratio = np.broadcast_to(np.asarray(offload_ratio, np.float64), len(sequence))[item]
    return step_plan(
        strategy=strategy,
        hdp_size=problem.hdp_size,
        tokens_per_rank=problem.tokens_per_rank,
        num_layers=problem.num_layers,
        pp_size=problem.pp_size,
        lengths=problem.lengths,
        sequence=rows,
        rank=ranks,
        micro_batch=micro_batches,
        tokens=piece_tokens(length, degree[item], index),
        offload_ratio=ratio,
        cp_degree=degree[item],
        cp_index=index,
        kept_gradient_share=kept_gradient_share,
        **columns,
    )
