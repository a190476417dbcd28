"""`hdp-balance` in a pipeline against plain loops written from the text of Algorithm 2, and against other orders.

The text: sort by length, descending; take sequences one after another across all buckets and give them to the ranks
that lag; different levels belong on different pipelines, so that what a pipeline runs one after another takes equal
time. Both readings of it are written out here: levels as rows, and always the pipelines that lag most.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pytest

from bytescale.arrays import IntArray
from bytescale.cost import CostModel, predict, preset_cost
from bytescale.lengths.source import batches, length_source
from bytescale.plan.validate import validate
from bytescale.planner.parts.rows import Placed
from bytescale.planner.parts.units import Units, units_of
from bytescale.planner.problem import Problem, make_problem
from bytescale.planner.strategies.hdp_balance import plan_balance
from bytescale.planner.strategies.hdp_naive import plan_naive
from bytescale.reproduction.calibration import paper_cluster
from bytescale.reproduction.systems import K, paper_problem, paper_workload

COSTS = {
    "70b": preset_cost("llama-70b", "paper", tp_size=8),
    "8x7b": preset_cost("mistral-8x7b", "paper", tp_size=4),
    "8x22b": preset_cost("mistral-8x22b", "h100", tp_size=8),
}
PIPELINES, STAGES, CAPACITY = 64, 4, 8192


def asked(lengths: IntArray, cost: CostModel, pipelines: int = PIPELINES) -> Problem:
    cut = np.minimum(lengths, pipelines * CAPACITY)
    return make_problem(cut, hdp_size=pipelines, tokens_per_rank=CAPACITY, cost=cost, pp_size=STAGES, offload="off")


@dataclass
class Pipelines:
    """Micro-batches of every pipeline as lists of (unit, seconds)."""

    num: int
    queue: list[list[tuple[int, float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queue = [[] for _ in range(self.num)]

    def done_s(self, rank: int, waits: int) -> float:
        times = [t for _, t in self.queue[rank]] or [0.0]
        return sum(times) + waits * max(times)


def packs_last(line: Pipelines, packs: list[tuple[int, float]], waits: int, num_leading: int) -> None:
    """Longest first to the pipeline that is done first; the shortest of each pipeline may lead."""
    own: dict[int, list[tuple[int, float]]] = defaultdict(list)
    load = [line.done_s(rank, waits) for rank in range(line.num)]
    for unit, t in packs:
        rank = min(range(line.num), key=lambda r: load[r])
        load[rank] += t
        own[rank].append((unit, t))
    leading = min(num_leading, min(len(own[rank]) for rank in range(line.num)))
    for rank in range(line.num):
        keep = len(own[rank]) - leading
        line.queue[rank] = own[rank][keep:][::-1] + line.queue[rank] + own[rank][:keep]


def level_rows(units: list[tuple[int, int, float]], packs: list[tuple[int, float]], num: int) -> Pipelines | None:
    """From short to long, first fit into rows of all pipelines; the longest packs fill the rows of the longest."""
    rows: list[list[tuple[int, int, float]]] = []
    for unit in sorted(units, key=lambda u: (u[2], u[0])):
        row = next((r for r in rows if sum(d for _, d, _ in r) + unit[1] <= num), None)
        if row is None:
            rows.append(row := [])
        row.append(unit)
    free = [num - sum(d for _, d, _ in row) for row in rows]
    if sum(free) > len(packs):
        return None
    fill: dict[int, list[tuple[int, float]]] = {}
    for k in sorted(range(len(rows)), key=lambda k: (-max(t for _, _, t in rows[k]), k)):
        fill[k] = [packs.pop(0) for _ in range(free[k])]
    line = Pipelines(num)
    for k, row in enumerate(rows):
        columns = [(unit, t) for unit, d, t in row for _ in range(d)] + fill[k][::-1]
        for rank, entry in enumerate(columns):
            line.queue[rank].append(entry)
    return line


def lagging_first(
    units: list[tuple[int, int, float]], packs: list[tuple[int, float]], num: int, waits: int, spare: int
) -> Pipelines | None:
    """The longest to the pipelines done first, counting packs that bring all of them to the same number."""
    line, ready = Pipelines(num), [0.0] * num
    mean_s = sum(t for _, t in packs) / len(packs) if packs else 0.0
    longest, left = [0.0] * num, len(packs) - spare
    for unit, d, t in sorted(units, key=lambda u: (-u[2], -u[1], u[0])):
        options = []
        for level in sorted({len(queue) for queue in line.queue}):
            able = [r for r in range(num) if len(line.queue[r]) <= level]
            load = {r: ready[r] + (level - len(line.queue[r])) * mean_s + waits * max(longest[r], t) for r in able}
            chosen = sorted(able, key=lambda r: load[r])[:d]
            if len(chosen) == d and sum(level - len(line.queue[r]) for r in chosen) <= left:
                options.append((load[chosen[-1]], level, chosen))
        if not options:
            return None
        _, level, chosen = min(options, key=lambda o: o[0])
        for rank in chosen:
            while len(line.queue[rank]) < level:
                line.queue[rank].append(packs.pop(0))
                ready[rank] += mean_s
                left -= 1
        start = max(ready[rank] for rank in chosen)
        for rank in chosen:
            line.queue[rank].append((unit, t))
            ready[rank], longest[rank] = start + t, max(longest[rank], t)
    return line


def widest_first(units: list[tuple[int, int, float]], num: int) -> Pipelines:
    """The widest to the pipelines done first among those with as many micro-batches."""
    line, ready = Pipelines(num), [0.0] * num
    for unit, d, t in sorted(units, key=lambda u: (-u[1], -u[2], u[0])):
        options = []
        for level in sorted({len(queue) for queue in line.queue}):
            alike = sorted((r for r in range(num) if len(line.queue[r]) == level), key=lambda r: ready[r])
            if len(alike) >= d:
                options.append((ready[alike[d - 1]], alike[:d]))
        start, chosen = min(options, key=lambda o: o[0])
        for rank in chosen:
            line.queue[rank].append((unit, t))
            ready[rank] = start + t
    return line


def step_of(problem: Problem, units: Units, line: Pipelines) -> float:
    places = sorted((unit, rank, k) for rank, queue in enumerate(line.queue) for k, (unit, _) in enumerate(queue))
    _, ranks, numbers = np.array(places, dtype=np.int64).T
    counts = np.array([len(queue) for queue in line.queue])
    plan = units.plan(problem, "by hand", Placed(ranks, numbers, counts))
    validate(plan)
    return predict(plan, problem.cost).step_time_s


def steps_by_hand(problem: Problem) -> dict[str, float]:
    degree = -(-problem.lengths // CAPACITY)
    units = units_of(problem, degree, np.zeros(len(degree)), CAPACITY)
    entries = list(zip(range(len(units.degree)), units.degree.tolist(), units.time_s.tolist(), strict=True))
    longs = entries[: units.num_long]
    num, waits = problem.hdp_size, problem.pp_size - 1
    steps = {}
    for name, leading, counted in [("simple", 0, 0), ("rows", 0, waits), ("rows led", waits, waits)]:
        packs = sorted(((u, t) for u, _, t in entries[units.num_long :]), key=lambda p: -p[1])
        line = level_rows(longs, packs, num)
        if line is not None:
            packs_last(line, packs, counted, leading)
            steps[name] = step_of(problem, units, line)
    for name, leading in [("lagging", 0), ("lagging led", waits)]:
        packs = sorted(((u, t) for u, _, t in entries[units.num_long :]), key=lambda p: -p[1])
        line = lagging_first(longs, packs, num, waits, leading * num)
        if line is not None:
            packs_last(line, packs, waits, leading)
            steps[name] = step_of(problem, units, line)
    packs = sorted(((u, t) for u, _, t in entries[units.num_long :]), key=lambda p: -p[1])
    line = widest_first(longs, num)
    packs_last(line, packs, 0, 0)
    return {**steps, "widest": step_of(problem, units, line)}


def balanced_s(problem: Problem) -> float:
    plan = plan_balance(problem)
    assert plan.predicted is not None
    return plan.predicted.step_time_s


@pytest.mark.parametrize("source", ["github", "byted"])
@pytest.mark.parametrize("model", sorted(COSTS))
def test_within_1_percent_of_plain_loops_and_never_behind_the_simple_order(source: str, model: str) -> None:
    for seed, tokens in ((0, 4), (1, 8)):
        (lengths,) = batches(length_source(source), 1, seed, tokens=tokens * 2**20)
        problem = asked(lengths, COSTS[model])
        by_hand, ours = steps_by_hand(problem), balanced_s(problem)
        assert ours <= min(by_hand.values()) * 1.01
        assert ours <= by_hand.get("simple", np.inf) * (1 + 1e-9)
        naive_s = predict(plan_naive(problem), problem.cost).step_time_s
        assert ours >= min([*by_hand.values(), naive_s]) * 0.99


@pytest.mark.parametrize("source", ["github", "byted"])
def test_never_slower_than_naive_in_200_batches(source: str) -> None:
    for number, lengths in enumerate(batches(length_source(source), 100, 3, tokens=2**19)):
        problem = asked(lengths, COSTS[sorted(COSTS)[number % 3]], pipelines=(8, 16, 12)[number % 3])
        naive = predict(plan_naive(problem), problem.cost)
        assert balanced_s(problem) <= naive.step_time_s * (1 + 1e-9)


def simple_s(problem: Problem) -> float:
    """Step of the simple order: gangs from short to long, first fit, packs in holes; infinite with too few packs."""
    units = units_of(problem, -(-problem.lengths // CAPACITY), np.zeros(problem.num_sequences), CAPACITY)
    entries = list(zip(range(len(units.degree)), units.degree.tolist(), units.time_s.tolist(), strict=True))
    packs = sorted(((u, t) for u, _, t in entries[units.num_long :]), key=lambda p: -p[1])
    line = level_rows(entries[: units.num_long], packs, problem.hdp_size)
    if line is None:
        return float("inf")
    packs_last(line, packs, 0, 0)
    return step_of(problem, units, line)


@pytest.mark.long
@pytest.mark.parametrize("context", [256, 512, 1024, 2048])
@pytest.mark.parametrize("source", ["github", "byted"])
@pytest.mark.parametrize("model", ["llama-70b", "mistral-8x7b", "mistral-8x22b"])
def test_never_behind_the_simple_order_or_naive_in_the_published_cells(model: str, source: str, context: int) -> None:
    cluster = paper_cluster(model)
    (lengths,) = paper_workload(source, context * K, cluster.batch_tokens, 1).batches
    problem = paper_problem(cluster, lengths, context * K)
    ours = balanced_s(problem)
    assert ours <= simple_s(problem) * (1 + 1e-9)
    assert ours <= predict(plan_naive(problem), problem.cost).step_time_s * (1 + 1e-9)


@pytest.mark.long
@pytest.mark.parametrize("source", ["github", "byted"])
def test_never_slower_than_naive_in_200_batches_of_64_pipelines_at_256k(source: str) -> None:
    for number, lengths in enumerate(batches(length_source(source), 100, 5, tokens=2**22)):
        problem = asked(np.minimum(lengths, 256 * K), COSTS[sorted(COSTS)[number % 3]])
        naive = predict(plan_naive(problem), problem.cost)
        assert balanced_s(problem) <= naive.step_time_s * (1 + 1e-9)
