"""Fig. 17: speedups over static of six models on two data sets at four contexts, and tokens/s beside them.

Throughput is the mean over batches of tokens / step time. Cost: about 1.5 s a cell of 20 batches.
"""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np

from bytescale.reproduction.calibration import PaperCluster, paper_cluster
from bytescale.reproduction.pool import Progress, each
from bytescale.reproduction.published import published
from bytescale.reproduction.rows import Row
from bytescale.reproduction.systems import CONTEXTS, NUM_BATCHES, paper_workload, step_times_s

SYSTEMS = ("static", "hdp-naive", "hdp-balance")
MODELS = ("llama-7b", "llama-13b", "llama-30b", "llama-70b", "mistral-8x7b", "mistral-8x22b")
DATA = ("github", "byted")


def figure_17(num_batches: int = NUM_BATCHES, progress: Progress = None, jobs: int = 1) -> list[Row]:
    """96 rows: two systems in each of 48 cells."""
    cells = list(product(MODELS, DATA, CONTEXTS))
    return [row for rows in each(partial(_cell, num_batches), cells, jobs, progress) for row in rows]


def _cell(num_batches: int, cell: tuple[str, str, str]) -> list[Row]:
    model, data, context = cell
    rates = _tokens_per_s(paper_cluster(model), data, CONTEXTS[context], num_batches)
    table = published()["fig17"][model][data]
    return list(_cell_rows(model, data, context, rates, table, list(CONTEXTS).index(context)))


def _tokens_per_s(cluster: PaperCluster, data: str, context: int, num_batches: int) -> dict[str, float]:
    work = paper_workload(data, context, cluster.batch_tokens, num_batches)
    return {system: float((cluster.batch_tokens / step_times_s(cluster, work, system)).mean()) for system in SYSTEMS}


def _cell_rows(
    model: str, data: str, context: str, ours: dict[str, float], paper: dict[str, Any], number: int
) -> Iterator[Row]:
    static = paper["baseline_ktokens_per_s"][number] * 1e3
    for system, key in (("hdp-naive", "naive"), ("hdp-balance", "balance")):
        speedup = paper[key][number]
        yield Row(
            figure="fig17",
            quantity="speedup over static",
            model=model,
            data=data,
            context=context,
            system=system,
            paper=speedup,
            ours=ours[system] / ours["static"],
            extra={
                "tokens_per_s": ours[system],
                "paper_tokens_per_s": speedup * static,
                "static_tokens_per_s": ours["static"],
                "paper_static_tokens_per_s": static,
            },
        )


def decay(rows: list[Row]) -> list[Row]:
    """Factor by which throughput falls per doubling of the context, 256K to 2M, geometric mean of the models."""
    paper, steps = published()["decay"]["github"], len(CONTEXTS) - 1
    ends = {(r.model, r.data, r.context, r.system): r.extra for r in rows}
    first, *_, last = CONTEXTS
    found = []
    for data in DATA:
        for system in SYSTEMS:
            key = "static_tokens_per_s" if system == "static" else "tokens_per_s"
            row = "hdp-balance" if system == "static" else system
            pairs = [[ends[m, data, c, row] for c in (first, last)] for m in MODELS]
            ours, read = (
                float(np.exp(np.mean([np.log(a[k] / b[k]) for a, b in pairs]) / steps)) for k in (key, f"paper_{key}")
            )
            extra = {"paper_from_pixels": read}
            given = paper[system] if data == "github" else None
            found.append(
                Row("decay", "throughput lost per doubling, times", ours, given, None, data, None, system, extra)
            )
    return found


def orders_that_fail(rows: list[Row]) -> list[str]:
    """Which orders of the paper ours breaks.

    Speedup grows with context; GitHub lies above Byted at 2M; models without a pipeline above those with one there.
    """
    ours = {(r.model, r.data, r.context, r.system): r.ours for r in rows}
    names, failed = list(CONTEXTS), []
    for model in MODELS:
        for system in SYSTEMS[1:]:
            for data in DATA:
                row = [ours[model, data, context, system] for context in names]
                if any(b <= a for a, b in pairwise(row)):
                    failed.append(f"{model} {data} {system}: does not grow with context")
            if ours[model, "github", "2M", system] <= ours[model, "byted", "2M", system]:
                failed.append(f"{model} {system}: github not above byted at 2M")
    at_2m = {model: ours[model, "github", "2M", "hdp-balance"] for model in MODELS}
    if min(at_2m[m] for m in MODELS[:3]) <= max(at_2m[m] for m in MODELS[3:]):
        failed.append("2M github: a model with a pipeline above one without")
    return failed
