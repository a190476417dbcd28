"""Fig. 12 and 13: the two worked examples of balancing, run by the engine and by the planner.

Fig. 12 puts sequences on 4, 3 and 2 ranks into the 8 micro-batches of one pipeline of four stages and one-rank packs
into the 18 of another; both are printed as ending together. A micro-batch on D ranks holds D times the context, so it
takes 1 - x + x * D, with x the share of attention at the capacity of a rank; the x that makes both end together is
found by bisection and set beside Fig. 6a, whose layers have 50 % of attention at 8K.

Fig. 13 has six ranks and shows which levels of length meet where. Ours: `hdp-balance` on a small batch of long and
short sequences, without a pipeline and with one; how many levels a pipeline runs, and how often it changes between
them, beside `hdp-naive`. Nothing is printed to compare with but the shape. Cost: about a second.
"""

import numpy as np

from bytescale.cost.model import CostModel, DirectionCost, Link
from bytescale.plan.step_plan import StepPlan, step_plan
from bytescale.planner import make_plan, make_problem
from bytescale.reproduction.calibration import paper_cluster
from bytescale.reproduction.published import published
from bytescale.reproduction.rows import Row
from bytescale.reproduction.systems import K
from bytescale.simulator.engine import SimulatedStep, simulate

_UNIT_TOKENS = 10_000


def figure_12() -> list[Row]:
    """The share of attention that makes both pipelines end together, and the bubbles then."""
    paper = published()["fig12"]
    low, high = 0.0, 1.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if _lag_s(_two_pipelines(middle)) > 0 else (middle, high)
    together, even = _two_pipelines(high), _two_pipelines(0.0)
    rows = [Row("fig12", "attention share of a layer at C, both end together", high, paper["attention_share_at_8k"])]
    for words, step in ((f"share {high:.2f}", together), ("share 0", even)):
        bubble = step.ranks.pp_bubble_s.mean(axis=1) / step.step_time_s
        wait = step.ranks.dp_bubble_s.mean(axis=1) / step.step_time_s
        for number, name in enumerate(("8 micro-batches on 4, 3, 2 ranks", "18 micro-batches on one rank")):
            extra = {"dp_bubble": float(wait[number])}
            rows.append(Row("fig12", f"PP bubble, {name}, {words}", float(bubble[number]), extra=extra))
    return rows


def _two_pipelines(attention_share: float) -> SimulatedStep:
    """Both pipelines of Fig. 12 in units of a one-rank micro-batch; other members of a gang are not simulated."""
    paper = published()["fig12"]
    degree = np.array(paper["degrees"] + [1] * paper["num_short_micro_batches"])
    tokens = np.rint(_UNIT_TOKENS * (1 - attention_share + attention_share * degree)).astype(np.int64)
    num_long = len(paper["degrees"])
    rank = (np.arange(len(degree)) >= num_long).astype(np.int64)
    plan = step_plan(
        strategy="fig12",
        hdp_size=2,
        pp_size=paper["num_stages"],
        tokens_per_rank=int(tokens.max()),
        num_layers=1,
        lengths=tokens,
        sequence=np.arange(len(degree)),
        rank=rank,
        micro_batch=np.arange(len(degree)) - num_long * rank,
        tokens=tokens,
        cp_degree=np.ones(len(degree), np.int64),
        cp_index=np.zeros(len(degree), np.int64),
    )
    return simulate(plan, equal_layers(paper["num_stages"], 1 / _UNIT_TOKENS))


def equal_layers(num_layers: int, token_s: float) -> CostModel:
    """Layers that take `token_s` a token forward and twice that backward, and nothing else."""
    free = Link(0.0, float("inf"))
    return CostModel(
        name="equal layers",
        num_layers=num_layers,
        forward=DirectionCost(0.0, token_s, 0.0, 1.0),
        backward=DirectionCost(0.0, 2 * token_s, 0.0, 1.0),
        kv_bytes_per_token=0.0,
        activation_bytes_per_token=0.0,
        intra_node=free,
        inter_node=free,
    )


def _lag_s(step: SimulatedStep) -> float:
    """How much longer the first pipeline works than the second."""
    waits = step.ranks.dp_bubble_s.mean(axis=1)
    return float(waits[1] - waits[0])


def figure_13() -> list[Row]:
    """Levels of length on six ranks, and on six pipelines of four stages."""
    cluster = paper_cluster("llama-7b")
    capacity = cluster.tokens_per_rank
    rng = np.random.default_rng(0)
    lengths = np.concatenate([[2 * capacity] * 4, [capacity] * 12, rng.integers(K, capacity // 2, 90)])
    rows = []
    for pp_size, words in ((1, "DP-Balance"), (4, "PP-Balance")):
        for system in ("hdp-naive", "hdp-balance"):
            problem = make_problem(
                lengths, hdp_size=6, tokens_per_rank=capacity, cost=cluster.cost, pp_size=pp_size, offload="off"
            )
            plan = make_plan(problem, system)
            step = simulate(plan, cluster.cost)
            done = step.makespan_s - step.ranks.dp_bubble_s.max(axis=1)
            levels, changes = _levels(plan)
            extra = {"levels_a_rank": levels, "level_changes_a_rank": changes, "step_s": step.step_time_s}
            spread = float(done.max() / done.mean())
            rows.append(Row("fig13", f"{words}, six ranks: last / mean end", spread, system=system, extra=extra))
    return rows


def _levels(plan: StepPlan) -> tuple[float, float]:
    """Mean number of levels of length (longest sequence of a micro-batch: 2C, C, less) a rank runs, and of changes."""
    longest = np.zeros(int(plan.num_micro_batches().sum()), np.int64)
    np.maximum.at(longest, plan.micro_batch_ids(), plan.lengths[plan.pieces.sequence])
    level = np.searchsorted([plan.tokens_per_rank, 2 * plan.tokens_per_rank], longest, side="right")
    own = np.split(level, np.cumsum(plan.num_micro_batches())[:-1])
    return (
        float(np.mean([len(np.unique(one)) for one in own])),
        float(np.mean([np.count_nonzero(np.diff(one)) for one in own])),
    )
