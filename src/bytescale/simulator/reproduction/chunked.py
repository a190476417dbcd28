"""An estimate of what chunked long sequences would give a pipeline, with memory and the reversed backward counted.

A long sequence crosses the stages as one micro-batch of D ranks, so while it is in one stage the others wait for it.
Here it is cut into n chunks of equal work, one micro-batch each, on the same D' ranks. Chunk i of w tokens after p
earlier ones computes against all keys and values up to its own, which stay on their ranks and go round once more:

    attention = 2a * w * (p + w / 2) / D',    D' - 1 ring steps of latency + (p + w) * bytes / (D' * bandwidth).

Its gradients reach earlier chunks, so the backward runs the chunks in reverse and starts when the last forward is
through: all chunks of a sequence are in flight on every stage, and fp32 key-and-value gradients are kept. All
sequences of at least so many ranks get the same n; of `TRIES` the best for the whole step counts, n = 1 among them. No
plan format holds this yet: it is an estimate by the engine's recurrence.

Cost: a Python step an operation and try.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bytescale.cost.makespan import earliest_starts
from bytescale.cost.predict import stage_layers
from bytescale.simulator.calibration import PaperCluster
from bytescale.simulator.reproduction.rows import IntArray
from bytescale.simulator.workload import FloatArray

TRIES = ((1, 1), (2, 64), (2, 8))
"""Chunks of a sequence, and the least ranks of one that is chunked."""


@dataclass(frozen=True)
class ChunkedStep:
    """What a step would take.

    Attributes:
        step_time_s: makespan.
        held_tokens: most tokens whose activations one rank and stage keeps.
        kept_gradient_bytes: fp32 key-and-value gradients kept for the longest sequence, per GPU and stage.
    """

    step_time_s: float
    held_tokens: int
    kept_gradient_bytes: float


@dataclass(frozen=True)
class _Unit:
    """A chunk group or a pack: forward and backward per layer of its parts, tokens of each on a rank, its ranks."""

    forward_s: FloatArray
    backward_s: FloatArray
    tokens: FloatArray
    ranks: IntArray


def chunked_step(lengths: IntArray, cluster: PaperCluster) -> ChunkedStep:
    """Estimate a step in which sequences above C may be chunked and short ones are packed to C.

    Raises:
        ValueError: no try gives an order that can run.
    """
    outcomes = []
    for num_chunks, least_ranks in TRIES:
        units, queues = _assign(lengths, cluster, num_chunks, least_ranks)
        try:
            step_s, held = _run(units, queues, cluster)
        except ValueError:
            continue
        longest = max(units, key=lambda unit: float(unit.tokens.sum() * len(unit.ranks)))
        kept = 2 * cluster.cost.kv_bytes_per_token * float(longest.tokens.sum()) * (len(longest.tokens) > 1)
        kept *= int(stage_layers(cluster.model.num_layers, cluster.pp_size)[0])
        outcomes.append(ChunkedStep(step_s, round(held), kept))
    if not outcomes:
        raise ValueError("no order of the chunks can run")
    return min(outcomes, key=lambda outcome: outcome.step_time_s)


def _assign(
    lengths: IntArray, cluster: PaperCluster, num_chunks: int, least_ranks: int
) -> tuple[list[_Unit], list[list[int]]]:
    """Units, longest first on the least loaded ranks, and the queue of every rank."""
    capacity = cluster.tokens_per_rank
    queues: list[list[int]] = [[] for _ in range(cluster.hdp_size)]
    load = np.zeros(cluster.hdp_size)
    counts = np.zeros(cluster.hdp_size, dtype=np.int64)
    units: list[_Unit] = []
    for s in np.sort(lengths[lengths > capacity])[::-1].tolist():
        degree = min(cluster.hdp_size, -(-s // capacity))
        forward, backward, tokens = _chunks(s, degree, num_chunks if degree >= least_ranks else 1, cluster)
        ranks = _level(counts, load, degree)
        load[ranks] = load[ranks].max() + float(forward.sum() + backward.sum())
        counts[ranks] += len(tokens)
        for rank in ranks.tolist():
            queues[rank].append(len(units))
        units.append(_Unit(forward, backward, tokens, ranks))
    for forward_s, backward_s, held in _packs(lengths[lengths <= capacity], cluster):
        rank = int(load.argmin())
        load[rank] += forward_s + backward_s
        queues[rank].append(len(units))
        units.append(_Unit(np.array([forward_s]), np.array([backward_s]), np.array([held]), np.array([rank])))
    return units, queues


def _level(counts: IntArray, load: FloatArray, degree: int) -> IntArray:
    """Least loaded `degree` ranks among those with equal micro-batch counts: aligned gangs cannot wait in a circle."""
    best, best_load = None, float("inf")
    for count in np.unique(counts).tolist():
        members = np.flatnonzero(counts == count)
        if len(members) >= degree:
            chosen = members[np.argsort(load[members], kind="stable")[:degree]]
            if load[chosen[-1]] < best_load:
                best, best_load = np.sort(chosen), float(load[chosen[-1]])
    assert best is not None  # the gang before was at least as wide and left its ranks equal
    return best


def _chunks(length: int, degree: int, num: int, cluster: PaperCluster) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Forward and backward per layer and tokens, of each chunk on each of its ranks; chunks of equal attention."""
    cost = cluster.cost
    cuts = length * np.sqrt(np.arange(num + 1) / num)
    width, before = np.diff(cuts), cuts[:-1]
    times = []
    for direction in (cost.forward, cost.backward):
        attention_s = 2.0 * direction.square_s * width * (before + width / 2) / degree
        wire_s = direction.transfer * cost.kv_bytes_per_token * (before + width) / degree
        wire_s = np.maximum(np.asarray(cost.inter_node.time_s(wire_s)), cost.ring_step_floor_s)
        exposed_s = (degree - 1) * np.maximum(0.0, wire_s - attention_s / degree)
        times.append(direction.token_s * width / degree + attention_s + exposed_s)
    return times[0], times[1], width / degree


def _packs(short: IntArray, cluster: PaperCluster) -> list[tuple[float, float, float]]:
    """Forward and backward per layer and tokens of first-fit-decreasing packs of at most C tokens, longest first."""
    cost, capacity = cluster.cost, cluster.tokens_per_rank
    room: list[int] = []
    tokens: list[int] = []
    square: list[float] = []
    first = 0
    for s in np.sort(short)[::-1].tolist():
        while first < len(room) and room[first] < 64:
            first += 1
        at = next((i for i in range(first, min(len(room), first + 64)) if room[i] >= s), len(room))
        if at == len(room):
            room.append(capacity)
            tokens.append(0)
            square.append(0.0)
        room[at] -= s
        tokens[at] += s
        square[at] += float(s) * s
    packs = []
    for t, q in zip(tokens, square, strict=True):
        forward, backward = (d.token_s * t + d.square_s * q for d in (cost.forward, cost.backward))
        packs.append((forward, backward, float(t)))
    return sorted(packs, key=lambda pack: pack[0] + pack[1], reverse=True)


def _order(sizes: Sequence[int], warm_up: int) -> list[tuple[int, int, int]]:
    """(unit position, part, direction) on one stage: forwards in order, backwards of a unit reversed and together."""
    forwards = [(u, part, 0) for u, size in enumerate(sizes) for part in range(size)]
    ends = np.cumsum(sizes)
    order: list[tuple[int, int, int]] = []
    unit = 0
    for count, forward in enumerate(forwards, 1):
        order.append(forward)
        while unit < len(sizes) and (count >= ends[unit] + warm_up or count == len(forwards)):
            order += [(unit, part, 1) for part in reversed(range(sizes[unit]))]
            unit += 1
    return order


def _run(units: list[_Unit], queues: list[list[int]], cluster: PaperCluster) -> tuple[float, float]:
    """Makespan and the most tokens held, over nodes ((unit part) * pp + stage) * 2 + direction."""
    pp = cluster.pp_size
    layers = stage_layers(cluster.model.num_layers, pp)
    sizes = np.array([len(unit.forward_s) for unit in units])
    first = np.cumsum(sizes) - sizes
    parts = np.arange(int(sizes.sum()))
    per_layer = np.stack(
        [np.concatenate([u.forward_s for u in units]), np.concatenate([u.backward_s for u in units])], 1
    )
    duration = np.asarray(per_layer[:, None, :] * layers[None, :, None], np.float64).ravel()
    source: list[IntArray] = []
    target: list[IntArray] = []
    tokens = np.concatenate([unit.tokens for unit in units])
    held = 0.0
    for queue in queues:
        own = sizes[queue].tolist()
        if not own:
            continue
        for stage in range(pp):
            order = np.array(_order(own, pp - stage - 1), np.int64)
            part = first[np.array(queue)[order[:, 0]]] + order[:, 1]
            nodes = (part * pp + stage) * 2 + order[:, 2]
            source.append(nodes[:-1])
            target.append(nodes[1:])
            held = max(held, float(np.cumsum(tokens[part] * (1 - 2 * order[:, 2])).max()))
    forward = (parts[:, None] * pp + np.arange(pp)) * 2
    source += [forward[:, :-1].ravel(), forward[:, 1:].ravel() + 1, forward[:, -1]]
    target += [forward[:, 1:].ravel(), forward[:, :-1].ravel() + 1, forward[:, -1] + 1]
    num = len(parts) * pp * 2
    start = earliest_starts(num, np.concatenate(source), np.concatenate(target), duration)
    return float((start + duration).max()), held
