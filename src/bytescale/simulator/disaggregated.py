"""Attention as tasks on any rank (DistCA): what a step takes when only the rest of a layer stays where its tokens are.

Documents are dealt into micro-batches of equal tokens, longest first; in one every rank holds as many tokens as the
others, at most C, cut from its documents laid end to end. The queries [b, e) that a rank holds of a document are a
task. Ranks below the mean attention take tasks, or their last queries in blocks of 128, from ranks above it, those with
most work a byte first, until the busiest is within a tolerance of the mean. Two halves of a micro-batch take turns, so
that what is sent hides behind compute:

    layer = max( linear + attention of the busiest rank,   most bytes into a rank / bandwidth )

With a pipeline all stages do the same direction at a time, and the tasks of the micro-batches then in flight go to any
rank of any stage: T micro-batches take T + P - 1 ticks a direction.

What is sent: queries and outputs of a task away from its tokens; keys and values [0, e) to every rank with tasks of the
document, once a rank; both again for gradients (`DirectionCost.transfer`). That a rank may have to send its keys to
many is not counted, as if they were passed on. No plan comes out: the runtime has no such exchange.

Invariant: tasks cover every query once. Cost: O(tasks) numpy steps for each task moved.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bytescale.arrays import FloatArray, IntArray
from bytescale.cost.micro_batch import Ulysses
from bytescale.cost.model import CostModel, DirectionCost, constant_s
from bytescale.cost.predict import stage_layers
from bytescale.errors import UserError

TOLERANCE = 0.1
"""Most of the busiest rank's attention above the mean; the source calls 0.05 to 0.15 best."""

BLOCK_TOKENS = 128
"""Queries are moved in multiples of it."""


@dataclass(frozen=True)
class Tasks:
    """Attention tasks of one tick. All of shape [n].

    Attributes:
        document, begin, end: whose queries.
        home, rank: rank that holds the tokens, and rank that runs the task.
    """

    document: IntArray
    begin: IntArray
    end: IntArray
    home: IntArray
    rank: IntArray


@dataclass(frozen=True)
class DisaggregatedStep:
    """A step in seconds, and what it needs.

    Attributes:
        step_time_s: of the micro-batches alone, like that of a bare simulation.
        exposed_s: of it, transfers that compute does not hide.
        num_micro_batches: of every rank.
        imbalance: busiest rank's attention over the mean, of the worst tick.
        received_tokens: most keys and values that a rank receives in a layer, beside its own.
    """

    step_time_s: float
    exposed_s: float
    num_micro_batches: int
    imbalance: float
    received_tokens: int


def simulate_disaggregated(
    lengths: IntArray,
    cost: CostModel,
    heads: Ulysses,
    *,
    hdp_size: int,
    tokens_per_rank: int,
    pp_size: int = 1,
    tolerance: float = TOLERANCE,
) -> DisaggregatedStep:
    """Deal, balance and time one batch.

    Args:
        lengths: of the documents.
        cost: what linear layers, attention and links take.
        heads: bytes of queries and outputs.
        hdp_size, tokens_per_rank, pp_size: R, C and P.
        tolerance: see `TOLERANCE`.

    Raises:
        UserError: a document that all ranks together cannot hold.
    """
    groups = deal(lengths, hdp_size, tokens_per_rank)
    cut = [cut_to_ranks(lengths, documents, hdp_size) for documents in groups]
    held = [-(-int(lengths[documents].sum()) // hdp_size) for documents in groups]
    num, num_ranks = len(groups), hdp_size * pp_size
    step_s = exposed_s = 0.0
    imbalance, received = 1.0, 0
    for tick in range(num + pp_size - 1):
        active = [m for m in range(tick - pp_size + 1, tick + 1) if 0 <= m < num]
        tokens = np.zeros(num_ranks)
        for m in active:
            tokens[(tick - m) * hdp_size : (tick - m + 1) * hdp_size] = held[m]
        tasks = _together([(cut[m], (tick - m) * hdp_size) for m in active])
        tasks, load = balanced(tasks, cost, heads, num_ranks, tolerance)
        sent, most = traffic_bytes(tasks, cost, heads, num_ranks)
        forward, backward = (_tick_s(cost, d, tokens, load, sent, pp_size) for d in (cost.forward, cost.backward))
        times = forward + backward + (forward if cost.recompute else 0.0)
        step_s, exposed_s = step_s + float(times[0]), exposed_s + float(times[1])
        imbalance, received = max(imbalance, float(load.max() / load.mean())), max(received, most)
    return DisaggregatedStep(step_s, exposed_s, num, imbalance, received)


def deal(lengths: IntArray, hdp_size: int, tokens_per_rank: int) -> list[IntArray]:
    """Documents of each micro-batch: longest first to the one with fewest tokens, as few as memory allows."""
    room = hdp_size * tokens_per_rank
    if int(lengths.max()) > room:
        raise UserError(f"a document of {int(lengths.max())} tokens does not fit {hdp_size} ranks of {tokens_per_rank}")
    order, num = np.argsort(-lengths, kind="stable"), -(-int(lengths.sum()) // room)
    while True:
        held, chosen = np.zeros(num, dtype=np.int64), np.zeros(len(lengths), dtype=np.int64)
        for i in order.tolist():
            chosen[i] = held.argmin()
            held[chosen[i]] += lengths[i]
        if int(held.max()) <= room:
            return [np.flatnonzero(chosen == m) for m in range(num) if held[m]]
        num += 1


def cut_to_ranks(lengths: IntArray, documents: IntArray, hdp_size: int) -> Tasks:
    """Documents laid end to end and cut into equal tokens, one share a rank."""
    ends = np.cumsum(lengths[documents])
    share = -(-int(ends[-1]) // hdp_size)
    edges = np.union1d(ends, np.arange(share, int(ends[-1]), share))
    begins = np.append(0, edges[:-1])
    which = np.searchsorted(ends, begins, side="right")
    first = (ends - lengths[documents])[which]
    home = begins // share
    return Tasks(documents[which], begins - first, edges - first, home, home)


def _together(parts: Sequence[tuple[Tasks, int]]) -> Tasks:
    """Tasks of several stages, the ranks of each shifted."""
    shifted = [
        (tasks.document, tasks.begin, tasks.end, tasks.home + shift, tasks.rank + shift) for tasks, shift in parts
    ]
    return Tasks(*(np.concatenate(columns) for columns in zip(*shifted, strict=True)))


def balanced(
    tasks: Tasks, cost: CostModel, heads: Ulysses, num_ranks: int, tolerance: float
) -> tuple[Tasks, FloatArray]:
    """Tasks moved, the lowest loads first, until the busiest rank is close to the mean; forward attention of ranks."""
    load = np.bincount(tasks.rank, weights=_area(cost, tasks.begin, tasks.end), minlength=num_ranks).astype(np.float64)
    mean = float(load.mean())
    # What has moved stays where it is, so this ends.
    while float(load.max()) > mean * (1 + tolerance):
        moved = _take(tasks, cost, heads, load, int(load.argmin()), mean)
        if moved is None:
            break
        tasks = moved
    return tasks, load


def _take(tasks: Tasks, cost: CostModel, heads: Ulysses, load: FloatArray, taker: int, mean: float) -> Tasks | None:
    """The tasks with the best one, or its last queries, on `taker`; brings `load` up to date. None if none helps."""
    spare = np.minimum(load[tasks.rank] - mean, mean - load[taker])
    offers = np.flatnonzero((tasks.rank == tasks.home) & (spare > 0))
    if not len(offers):
        return None
    begin, end = tasks.begin[offers], tasks.end[offers]
    work, width, last = _area(cost, begin, end), end - begin, end.astype(np.float64)
    share = np.minimum(spare[offers] / work, 1.0)
    # Queries [e - x, e) have about the share (2ex - x^2) / (2ew - w^2) of the work.
    x = last - np.sqrt(np.maximum(0.0, last**2 - share * (2 * last * width - width**2)))
    taken = np.minimum(np.maximum(1.0, np.ceil(x / BLOCK_TOKENS)) * BLOCK_TOKENS, width).astype(np.int64)
    num_bytes = taken * heads.query_bytes_per_token + last * cost.kv_bytes_per_token
    pick = int((share * work / num_bytes).argmax())
    i, middle = int(offers[pick]), int(end[pick] - taken[pick])
    (area,) = _area(cost, np.array([middle]), end[pick : pick + 1])
    load[tasks.rank[i]] -= area
    load[taker] += area
    keep = np.arange(len(tasks.rank)) != i if middle == begin[pick] else np.ones(len(tasks.rank), dtype=bool)
    cut = np.where(np.arange(len(tasks.rank)) == i, middle, tasks.end)
    return Tasks(
        np.append(tasks.document[keep], tasks.document[i]),
        np.append(tasks.begin[keep], middle),
        np.append(cut[keep], tasks.end[i]),
        np.append(tasks.home[keep], tasks.home[i]),
        np.append(tasks.rank[keep], taker),
    )


def traffic_bytes(tasks: Tasks, cost: CostModel, heads: Ulysses, num_ranks: int) -> tuple[FloatArray, int]:
    """Bytes that each rank receives in a layer's forward, and the most keys and values of a rank, in tokens."""
    away = tasks.rank != tasks.home
    half = (tasks.end - tasks.begin)[away] * heads.query_bytes_per_token / 2
    num_bytes, received = np.zeros(num_ranks), np.zeros(num_ranks)
    for ranks in (tasks.rank[away], tasks.home[away]):  # queries one way, outputs the other
        np.add.at(num_bytes, ranks, half)
    by_document = np.argsort(tasks.document, kind="stable")
    for rows in np.split(by_document, np.flatnonzero(np.diff(tasks.document[by_document])) + 1):
        # Where the tokens lie: one run a home rank; where tasks run: keys up to the last one's end.
        homes, at = np.unique(tasks.home[rows], return_inverse=True)
        first, last = np.full(len(homes), np.iinfo(np.int64).max), np.zeros(len(homes), dtype=np.int64)
        np.minimum.at(first, at, tasks.begin[rows])
        np.maximum.at(last, at, tasks.end[rows])
        runners, at = np.unique(tasks.rank[rows], return_inverse=True)
        until = np.zeros(len(runners), dtype=np.int64)
        np.maximum.at(until, at, tasks.end[rows])
        needed = np.clip(until[:, None] - first, 0, last - first) * (runners[:, None] != homes)
        received[runners] += needed.sum(axis=1)
    return num_bytes + received * cost.kv_bytes_per_token, int(received.max())


def _area(cost: CostModel, begin: IntArray, end: IntArray) -> FloatArray:
    """Attention of queries [b, e) in units of a; what a whole document costs on one rank, shared out by its queries."""
    return np.asarray((end - begin) * (begin + end + cost.block_half_tokens), np.float64)


def _tick_s(
    cost: CostModel, direction: DirectionCost, tokens: FloatArray, load: FloatArray, sent: FloatArray, pp_size: int
) -> FloatArray:
    """Seconds of a tick in one direction, and those that compute does not hide. Shape [2].

    Args:
        cost, direction: what things take.
        tokens, load, sent: of each rank: tokens held, attention in units of a, bytes of a layer.
        pp_size: P.
    """
    compute_s = float((direction.token_s * tokens + direction.square_s * load).max())
    # The constant of a layer twice: a micro-batch runs in two halves.
    compute_s += 2 * constant_s(cost)[0 if direction is cost.forward else 1]
    wire_s = 0.0
    if cost.has_communication and float(sent.max()) > 0:
        link = cost.inter_node if len(load) > cost.ranks_per_node else cost.intra_node
        wire_s = direction.transfer * float(sent.max()) / link.bytes_per_s + 2 * link.latency_s
    layers = stage_layers(cost, pp_size)
    ends = np.zeros(pp_size)
    ends[0] += direction.embedding_token_s * float(tokens.max())
    ends[-1] += direction.head_token_s * float(tokens.max())
    total = float((layers * max(compute_s, wire_s) + ends).max())
    return np.array([total, total - float((layers * compute_s + ends).max())])
