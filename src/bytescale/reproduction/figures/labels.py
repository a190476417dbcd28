"""Byted again with the labels of Fig. 4: how much the speedups hang on lengths that the paper does not state.

The generator `byted` meets the shares that the text states (44.3 % of the tokens from 128K, 37 % above 256K, 12.1 % at
2M) and sets the labels of the figure aside. Here the labels are taken at their word, as shares of the tokens whose
length lies above the label (*lower edges*) or around it (*centres*, from 1/sqrt(2) to sqrt(2) times the label). Which
of its labels are Byted's is itself inferred. Cost: three times the Byted half of Fig. 17, with few batches.
"""

from functools import partial
from itertools import product

import numpy as np

from bytescale.lengths.distributions import source_of_token_shares
from bytescale.lengths.source import length_source
from bytescale.lengths.table import LengthSource
from bytescale.reproduction.calibration import paper_cluster
from bytescale.reproduction.figures.throughput import MODELS
from bytescale.reproduction.pool import Progress, each
from bytescale.reproduction.published import published
from bytescale.reproduction.rows import Row
from bytescale.reproduction.systems import CONTEXTS, SEED, Workload, step_times_s
from bytescale.simulator.workload import stratified_batches

NUM_BATCHES = 4
READINGS = ("as stated in the text", "labels as lower edges", "labels as centres")
SYSTEMS = {"hdp-naive": "naive", "hdp-balance": "balance"}


def label_table(num_batches: int = NUM_BATCHES, progress: Progress = None, jobs: int = 1) -> list[Row]:
    """Error of the six models on Byted under three readings of its lengths."""
    return each(partial(_row, num_batches), list(product(READINGS, MODELS)), jobs, progress)


def byted(reading: str) -> LengthSource:
    """The length distribution under a reading."""
    if reading == READINGS[0]:
        return length_source("byted")
    paper = published()["fig4"]["byted_labels"]
    edges = np.array(paper["from_k"], np.float64)
    if reading == READINGS[2]:
        edges[1:-1] /= np.sqrt(2.0)
    exponents = [1.0, *[2.0] * (len(edges) - 2), 0.0]
    rows = zip(np.rint(edges).astype(int).tolist(), paper["token_shares"], exponents, strict=True)
    return source_of_token_shares("byted-labels", tuple(rows))


def _row(num_batches: int, cell: tuple[str, str]) -> Row:
    """Error of the eight speedups of a model under a reading, and balance at 2M beside the printed one."""
    reading, model = cell
    cluster, source = paper_cluster(model), byted(reading)
    table = published()["fig17"][model]["byted"]
    logs, at_2m = [], {}
    for number, tokens in enumerate(CONTEXTS.values()):
        batches = stratified_batches(
            source, num_batches=num_batches, batch_tokens=cluster.batch_tokens, context=tokens, seed=SEED
        )
        work = Workload("byted", tokens, tuple(batches))
        rate = {name: float((1.0 / step_times_s(cluster, work, name)).mean()) for name in ("static", *SYSTEMS)}
        at_2m = {name: rate[name] / rate["static"] / table[key][number] for name, key in SYSTEMS.items()}
        logs += [float(np.log(ratio)) for ratio in at_2m.values()]
    extra = {
        "bias": float(np.exp(np.mean(logs))),
        "naive_2m_over_paper": at_2m["hdp-naive"],
        "balance_2m_over_paper": at_2m["hdp-balance"],
    }
    mean = float(np.expm1(np.abs(logs).mean()))
    return Row("labels", "mean error of the speedups on Byted", mean, model=model, data=reading, extra=extra)
