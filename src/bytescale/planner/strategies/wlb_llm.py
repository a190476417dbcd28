"""`wlb-llm`: one degree for all, packs of variable length with equal work, each sharded as suits it (WLB-LLM).

Groups and degree are those of `static`. Documents, longest first, join the pack with the least attention plus linear
work if memory takes them there, else the pack with the fewest tokens; where neither holds them a pack is added. The
number of packs is what memory asks for, the same for all groups.

Each pack is sharded in the way that ends sooner. Per document: each is cut over all ranks of its group. Per sequence:
in the source the pack is cut as one sequence, so that a short document lies on one rank or two. In our plans it lies
on one: documents go longest first to the rank with the least work.

The source also lets outlier documents wait for a later batch, which changes the order of samples; a plan is one batch,
so that is left out. Invariant: every gang is one aligned block of ranks whose micro-batches correspond one to one, so
no cycle can arise. Cost: O(n log n) steps of Python.
"""

import heapq

import numpy as np

from bytescale.arrays import FloatArray, IntArray
from bytescale.plan.step_plan import StepPlan
from bytescale.planner.parts.degrees import group_time_s, micro_batch_s, sequence_time_s
from bytescale.planner.parts.rows import plan_of_groups, spread
from bytescale.planner.problem import Problem
from bytescale.planner.strategies.static import static_degree


def plan_wlb(problem: Problem) -> StepPlan:
    """Pack, shard every pack, and give packs to the least loaded groups.

    Raises:
        UserError: what `static` refuses.
    """
    degree = static_degree(problem)
    num_groups = problem.hdp_size // degree
    lengths, ratio = problem.lengths, problem.fixed_ratio
    work_s = sequence_time_s(problem, lengths, np.full_like(lengths, degree), np.full(len(lengths), ratio))
    pack = balanced_packs(work_s, -(-lengths // degree), problem.fixed_capacity, num_groups)
    num_packs = int(pack.max()) + 1
    time_s = group_time_s(problem, lengths, pack, np.full(num_packs, degree), ratio)
    whole = np.full(len(lengths), -1, dtype=np.int64)  # rank inside its group of a document that is not cut
    by_pack = np.argsort(pack, kind="stable")
    for rows in np.split(by_pack, np.cumsum(np.bincount(pack))[:-1]):
        p = int(pack[rows[0]])
        dealt = _whole_on_ranks(problem, rows, degree) if degree > 1 else None
        if dealt is not None and dealt[1] < time_s[p]:
            whole[rows], time_s[p] = dealt
    group, number = _least_loaded_groups(time_s, num_groups)
    degrees = np.where(whole < 0, degree, 1)
    item, index = spread(degrees)
    member = np.where(whole[item] < 0, index, whole[item])
    return plan_of_groups(
        problem,
        "wlb-llm",
        sequence=np.arange(len(lengths)),
        degree=degrees,
        ranks=group[pack[item]] * degree + member,
        micro_batches=number[pack[item]],
        offload_ratio=ratio,
    )


def balanced_packs(work_s: FloatArray, tokens: IntArray, capacity: int, num_groups: int) -> IntArray:
    """Pack of each document, numbered without gaps.

    Args:
        work_s: of each document. Shape [n].
        tokens: of each document on a rank.
        capacity: tokens of a rank.
        num_groups: packs are a multiple of it, as long as memory asks for no more.
    """
    num = -(-int(tokens.sum()) // capacity)
    num = -(-num // num_groups) * num_groups
    load, held = [0.0] * num, [0] * num
    by_work = [(0.0, p) for p in range(num)]
    by_tokens = [(0, p) for p in range(num)]
    pack = np.zeros(len(tokens), dtype=np.int64)
    size, work = tokens.tolist(), work_s.tolist()
    for i in np.argsort(-tokens, kind="stable").tolist():
        while by_work[0][0] != load[by_work[0][1]]:
            heapq.heappop(by_work)
        while by_tokens[0][0] != held[by_tokens[0][1]]:
            heapq.heappop(by_tokens)
        p = by_work[0][1]
        if held[p] + size[i] > capacity:
            p = by_tokens[0][1]
        if held[p] + size[i] > capacity:
            p = len(load)
            load.append(0.0)
            held.append(0)
        load[p] += work[i]
        held[p] += size[i]
        heapq.heappush(by_work, (load[p], p))
        heapq.heappush(by_tokens, (held[p], p))
        pack[i] = p
    return np.unique(pack, return_inverse=True)[1].astype(np.int64)


def _whole_on_ranks(problem: Problem, rows: IntArray, degree: int) -> tuple[IntArray, float] | None:
    """Rank of each document of a pack when none is cut, and the time; None where one does not fit or a rank is idle."""
    lengths = problem.lengths[rows]
    if len(rows) < degree or int(lengths.max()) > problem.fixed_capacity:
        return None
    work = sequence_time_s(problem, lengths, np.ones_like(lengths), np.full(len(rows), problem.fixed_ratio)).tolist()
    rank = np.zeros(len(rows), dtype=np.int64)
    held = [0] * degree
    least = [(0.0, r) for r in range(degree)]
    for i in np.argsort(-lengths, kind="stable").tolist():
        load, r = heapq.heappop(least)
        held[r] += int(lengths[i])
        if held[r] > problem.fixed_capacity:
            return None
        rank[i] = r
        heapq.heappush(least, (load + work[i], r))
    return rank, max(least)[0] + micro_batch_s(problem)


def _least_loaded_groups(time_s: FloatArray, num_groups: int) -> tuple[IntArray, IntArray]:
    """Group and micro-batch number of each pack: longest first to the least loaded group, in rounds."""
    group, number = np.zeros(len(time_s), dtype=np.int64), np.zeros(len(time_s), dtype=np.int64)
    order, load = np.argsort(-time_s, kind="stable"), np.zeros(num_groups)
    for first in range(0, len(order), num_groups):
        packs = order[first : first + num_groups]
        chosen = np.argsort(load, kind="stable")[: len(packs)]
        group[packs], number[packs] = chosen, first // num_groups
        load[chosen] += time_s[packs]
    return group, number
