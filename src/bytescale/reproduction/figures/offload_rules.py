"""The offload step of Fig. 20 under each rule: off, Eq. 3 capped at several multiples of C, Eq. 3 as printed, `best`.

The paper gains 26 % from offloading before it balances. A gain can come from two things. Fewer ranks a sequence let
more gangs run side by side, so that ranks wait less; and memory that is free holds larger packs. Both are in the
simulator: gangs wait for their members, and packs of short sequences could only save the constant of a micro-batch,
which the published times leave no room for. So each row has the throughput beside that without offloading, and where
the time goes: waiting, exposed copies, and how far the step is from the work that no rule changes.

Cost: six batches a data set, each planned about fifteen times.
"""

from functools import partial
from itertools import product
from typing import Any

import numpy as np

from bytescale.cost.predict import lower_bound_s
from bytescale.planner import make_plan, make_problem
from bytescale.reproduction.calibration import paper_cluster
from bytescale.reproduction.figures.throughput import DATA
from bytescale.reproduction.pool import Progress, each
from bytescale.reproduction.published import published
from bytescale.reproduction.rows import Row
from bytescale.reproduction.systems import CONTEXTS, paper_workload
from bytescale.simulator.engine import simulate
from bytescale.simulator.outcome import shares

MODEL, CONTEXT = "llama-7b", "2M"
NUM_BATCHES = 6
CAPS = (1.25, 1.5, 2.0, 3.0, float("inf"))
SYSTEMS = ("hdp-naive", "hdp-balance", "best")


def offload_table(num_batches: int = NUM_BATCHES, progress: Progress = None, jobs: int = 1) -> list[Row]:
    """Throughput with offloading over throughput without, by system and rule."""
    return [
        row for rows in each(partial(_rows, num_batches), list(product(DATA, SYSTEMS)), jobs, progress) for row in rows
    ]


def _rows(num_batches: int, cell: tuple[str, str]) -> list[Row]:
    data, system = cell
    caps: list[float | None] = [None, *(CAPS if system != "best" else CAPS[-1:])]
    figures = [_figures(num_batches, data, system, cap) for cap in caps]
    step = published()["fig20"]["speedup"]
    rows = []
    for cap, own in zip(caps, figures, strict=True):
        ours = own["tokens_per_s"] / figures[0]["tokens_per_s"]
        printed = (
            step["offload"] / step["naive"] if (data, system) == ("byted", "hdp-naive") and cap is not None else None
        )
        rows.append(
            Row(
                "offload",
                "throughput / without offloading",
                ours,
                printed,
                MODEL,
                data,
                CONTEXT,
                system,
                {"rule": _words(system, cap), **own},
            )
        )
    return rows


def _words(system: str, cap: float | None) -> str:
    if cap is None:
        return "off"
    if system == "best":
        return "least work"
    return "Eq. 3 as printed" if np.isinf(cap) else f"Eq. 3, at most {cap:g} C"


def _figures(num_batches: int, data: str, system: str, cap: float | None) -> dict[str, Any]:
    """Means over the batches, of the step without its fixed cost."""
    cluster = paper_cluster(MODEL)
    work = paper_workload(data, CONTEXTS[CONTEXT], cluster.batch_tokens, num_batches)
    found = []
    for lengths in work.batches:
        problem = make_problem(
            lengths,
            hdp_size=cluster.hdp_size,
            tokens_per_rank=cluster.tokens_per_rank,
            cost=cluster.cost,
            offload="off" if cap is None else "auto",
            offload_cap=cap or 1.0,
        )
        step = simulate(make_plan(problem, system), cluster.cost)
        parts, bound_s = shares(step), lower_bound_s(cluster.cost, lengths, cluster.hdp_size)
        longest = int(step.plan.lengths.argmax())
        degree = int(step.plan.pieces.cp_degree[step.plan.pieces.sequence == longest][0])  # type: ignore[index]
        found.append(
            (
                cluster.batch_tokens / (step.step_time_s + cluster.update_s),
                step.step_time_s / bound_s,
                parts.gang_wait,
                parts.dp_bubble,
                degree,
            )
        )
    names = ("tokens_per_s", "gap", "gang_wait", "dp_bubble", "ranks_of_the_longest")
    return dict(zip(names, np.mean(found, axis=0).tolist(), strict=True))
