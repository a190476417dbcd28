"""Fig. 18b: what single ranks run in one step, as forward/backward seconds of their micro-batches.

The paper shows one step of four random ranks. Ours is the batch whose step ratios come nearest to the printed ones; of
its ranks those at the quarters of the own work, the lightest and the heaviest among them. Compared are the longest
micro-batch, a usual static one, and the spread of the ranks. Cost: that of planning the batches with three systems.
"""

from typing import Any

import numpy as np

from bytescale.cost.predict import durations
from bytescale.reproduction.calibration import PaperCluster, paper_cluster
from bytescale.reproduction.figures.case_study import CONTEXT, DATA, MODEL
from bytescale.reproduction.published import published
from bytescale.reproduction.rows import Row
from bytescale.reproduction.systems import CONTEXTS, NUM_BATCHES, folded_cost, paper_workload, run_step
from bytescale.simulator.engine import SimulatedStep

SYSTEMS = {"static": "static", "naive": "hdp-naive", "balance": "hdp-balance"}
NUM_SHOWN = 5


def figure_18b(num_batches: int = NUM_BATCHES) -> list[Row]:
    """Longest and usual micro-batches of a step, and the timelines of a few ranks."""
    cluster, paper = paper_cluster(MODEL), published()["fig18b"]
    steps = _typical_steps(cluster, num_batches)
    rows = []
    for name, system in SYSTEMS.items():
        forward_s, backward_s = _seconds(cluster, steps[name])
        longest = int((forward_s + backward_s).argmax())
        printed = paper["longest_s"][name]
        rows += [
            _row("longest micro-batch, forward s", float(forward_s[longest]), printed[0], system),
            _row("longest micro-batch, backward s", float(backward_s[longest]), printed[1], system),
        ]
        if name == "static":
            usual = np.median(forward_s), np.median(backward_s)
            for words, ours, given in zip(("forward", "backward"), usual, paper["usual_static_s"], strict=True):
                rows.append(_row(f"usual micro-batch, {words} s", float(ours), given, system))
        rows += [
            _row("own work of a rank, s", work_s, None, system, timeline=words)
            for work_s, words in _shown(steps[name], forward_s, backward_s)
        ]
    return rows


def _row(quantity: str, ours: float, paper: float | None, system: str, **extra: Any) -> Row:
    return Row("fig18b", quantity, ours, paper, MODEL, DATA, CONTEXT, system, extra)


def _typical_steps(cluster: PaperCluster, num_batches: int) -> dict[str, SimulatedStep]:
    """The three steps of the batch nearest to the printed step ratios."""
    work = paper_workload(DATA, CONTEXTS[CONTEXT], cluster.batch_tokens, num_batches)
    steps = {
        name: [run_step(cluster, batch, system, context=work.context) for batch in work.batches]
        for name, system in SYSTEMS.items()
    }
    log_s = {name: np.log([step.step_time_s for step in own]) for name, own in steps.items()}
    printed = published()["fig18"]["step_s"]
    distance = sum(
        np.abs(log_s["static"] - log_s[name] - np.log(printed["static"] / printed[name]))
        for name in ("naive", "balance")
    )
    nearest = int(np.argmin(distance))
    return {name: own[nearest] for name, own in steps.items()}


def _seconds(cluster: PaperCluster, step: SimulatedStep) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward of every micro-batch. Both of shape [M]."""
    cost = folded_cost(cluster.cost, step.plan) if step.plan.strategy == "static" else cluster.cost
    times = durations(step.plan, cost)
    return times.forward_s.sum(axis=1), times.backward_s.sum(axis=1)


def _shown(step: SimulatedStep, forward_s: np.ndarray, backward_s: np.ndarray) -> list[tuple[float, str]]:
    """Own work of ranks from the lightest to the heaviest, and their longest micro-batches in words."""
    counts = step.plan.num_micro_batches()
    own = np.split(np.arange(int(counts.sum())), np.cumsum(counts)[:-1])
    work_s = np.array([(forward_s[rows] + backward_s[rows]).sum() for rows in own])
    by_work = np.argsort(work_s, kind="stable")
    chosen = by_work[np.linspace(0, len(by_work) - 1, min(NUM_SHOWN, len(by_work))).round().astype(int)]
    shown = []
    for rank in chosen.tolist():
        rows = own[rank][np.argsort(-forward_s[own[rank]], kind="stable")]
        words = [f"{forward_s[i]:.0f}/{backward_s[i]:.0f}" for i in rows[:8] if forward_s[i] >= 2.0]
        rest = len(rows) - len(words)
        shown.append((float(work_s[rank]), " ".join([*words, f"and {rest} more" if rest else ""]).strip()))
    return shown
