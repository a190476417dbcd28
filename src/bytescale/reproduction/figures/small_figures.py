"""Fig. 4, 5 and 6: the length distributions, the bubble of unequal micro-batches, time over length, random packing.

Fig. 5 is run by the engine: two pipelines of 4 stages and 8 micro-batches, one with slow ones at 0 and 7; the slow
factor that gives the printed bubble is found by bisection. Fig. 6b draws batches of 1.2M tokens cut at 32K and packs
them at random, counting attention FLOPs alone, since a smallest pack of 6.5 beside 62 leaves no room for linear ones.
Cost: well under a second each.
"""

from typing import Any

import numpy as np

from bytescale.cost.model import CostModel, DirectionCost, Link
from bytescale.lengths.source import length_source
from bytescale.plan.step_plan import step_plan
from bytescale.reproduction.calibration import paper_cluster
from bytescale.reproduction.published import published
from bytescale.reproduction.rows import Row
from bytescale.reproduction.systems import K
from bytescale.simulator.engine import SimulatedStep, simulate
from bytescale.simulator.workload import stratified_batches


def figure_4() -> list[Row]:
    """Shares of tokens and sequences of the two length generators."""
    rows = []
    for data in ("byted", "github"):
        paper: dict[str, Any] = published()["fig4"][data]
        lengths = stratified_batches(
            length_source(data), num_batches=1, batch_tokens=1024 * K * K, context=2048 * K, seed=0
        )[0]
        tokens = float(lengths.sum())
        ours = {
            "tokens_from_128k": float(lengths[lengths >= 128 * K].sum()) / tokens,
            "tokens_above_256k": float(lengths[lengths > 256 * K].sum()) / tokens,
            "tokens_of_2m": float(lengths[lengths >= 2048 * K].sum()) / tokens,
            "sequences_from_128k": float((lengths >= 128 * K).mean()),
            "sequences_of_2m": float((lengths >= 2048 * K).mean()),
            "sequences_up_to_4k": float((lengths <= 4 * K).mean()),
        }
        rows += [Row("fig4", name.replace("_", " "), value, paper.get(name), data=data) for name, value in ours.items()]
    return rows


def unequal_pipelines(slow_factor: float) -> SimulatedStep:
    """Two pipelines as in Fig. 5; time is proportional to tokens, the backward takes twice the forward."""
    paper = published()["fig5"]
    num, stages, base = paper["num_micro_batches"], paper["num_stages"], 10_000
    fast = np.full(num, base)
    slow = fast.copy()
    slow[paper["slow_micro_batches"]] = round(base * slow_factor)
    lengths = np.concatenate([slow, fast])
    plan = step_plan(
        strategy="fig5",
        hdp_size=2,
        pp_size=stages,
        tokens_per_rank=int(lengths.max()),
        num_layers=1,
        lengths=lengths,
        sequence=np.arange(2 * num),
        rank=np.repeat([0, 1], num),
        micro_batch=np.tile(np.arange(num), 2),
        tokens=lengths,
        cp_degree=np.ones(2 * num, np.int64),
        cp_index=np.zeros(2 * num, np.int64),
    )
    free = Link(0.0, float("inf"))
    unit = 1.0 / base
    cost = CostModel(
        name="equal layers",
        num_layers=stages,
        forward=DirectionCost(0.0, unit, 0.0, 1.0),
        backward=DirectionCost(0.0, 2 * unit, 0.0, 1.0),
        kv_bytes_per_token=0.0,
        activation_bytes_per_token=0.0,
        intra_node=free,
        inter_node=free,
    )
    return simulate(plan, cost)


def dp_bubble(step: SimulatedStep) -> float:
    """Longest wait of a pipeline at the end, as a part of the step."""
    return float(step.ranks.dp_bubble_s.max() / step.step_time_s)


def figure_5() -> list[Row]:
    """The bubble over the slow factor, and the factor of the printed one."""
    paper = published()["fig5"]["dp_bubble"]
    low, high = 1.0, 8.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if dp_bubble(unequal_pipelines(middle)) < paper else (low, middle)
    rows = [
        Row("fig5", f"DP bubble, slow micro-batches {factor:g} times as long", dp_bubble(unequal_pipelines(factor)))
        for factor in (1.25, 1.5, 2.0, 3.0)
    ]
    step = unequal_pipelines(high)
    pp_bubble = float(step.ranks.pp_bubble_s[1].mean() / step.step_time_s)
    extra = {"slow_factor": high, "pp_bubble_of_fast_pipeline": pp_bubble}
    return [
        *rows,
        Row("fig5", f"DP bubble, slow micro-batches {high:.2f} times as long", dp_bubble(step), paper, extra=extra),
    ]


def figure_6() -> list[Row]:
    """Attention share over length, and the spread of randomly packed micro-batches."""
    paper = published()["fig6"]
    cluster = paper_cluster("llama-7b")
    cost, model = cluster.cost, cluster.model
    linear = cost.forward.token_s
    projections = linear * 2.0 * model.attention_parameters / model.linear_flops_per_token
    rows = []
    for k, attention_ms, mlp_ms in zip(paper["lengths_k"], paper["attention_ms"], paper["mlp_ms"], strict=True):
        s = k * K
        attention = cost.forward.square_s * s * s + projections * s
        mlp = (linear - projections) * s
        rows.append(
            Row(
                "fig6",
                "attention share of a layer",
                attention / (attention + mlp),
                attention_ms / (attention_ms + mlp_ms),
                model="llama-7b",
                context=f"{k}K",
                extra={"attention_ms": 1e3 * attention, "mlp_ms": 1e3 * mlp},
            )
        )
    return rows + _random_packing_rows(np.array(paper["packing_tflops"]))


def _random_packing_rows(paper: np.ndarray[Any, Any], num_batches: int = 200, seed: int = 0) -> list[Row]:
    context, num_ranks = 32 * K, 6
    batches = stratified_batches(
        length_source("github"), num_batches=num_batches, batch_tokens=36 * context, context=context, seed=seed
    )
    spread, imbalance = [], []
    for lengths in batches:
        work = random_packs(lengths, context)
        work = work[: num_ranks * num_ranks]
        per_rank = work.reshape(num_ranks, num_ranks).sum(axis=1)
        spread.append(float(work.max() / work.min()))
        imbalance.append(float(per_rank.max() / per_rank.mean()))
    rows = []
    for quantity, ours, given in (
        ("max / min work of a micro-batch", spread, paper.max() / paper.min()),
        ("max / mean work of a rank", imbalance, paper.sum(axis=1).max() / paper.sum(axis=1).mean()),
    ):
        low, high = np.quantile(ours, [0.1, 0.9]).tolist()
        extra = {"p10": low, "p90": high}
        median = float(np.median(ours))
        rows.append(
            Row("fig6", f"random packing to 32K: {quantity}, median", median, float(given), data="github", extra=extra)
        )
    return rows


def random_packs(lengths: np.ndarray[Any, Any], capacity: int) -> np.ndarray[Any, Any]:
    """Sum of s^2 of packs filled in arrival order up to `capacity`."""
    work, room = [0.0], capacity
    for length in lengths.tolist():
        if length > room:
            work.append(0.0)
            room = capacity
        work[-1] += float(length) ** 2
        room -= length
    return np.array(work)
