"""`fcp`: flexible context parallelism by blocks. Sequences are cut into blocks of 4K tokens, any block on any rank.

A step runs in waves; in a wave every rank has one micro-batch of at most C tokens, and all blocks of a sequence are
in the same wave, since they exchange keys and values. Waves run one after another, so sequences fill them in order of
length. Inside a wave blocks go longest first (by their own causal work) to the least loaded rank that still holds them;
where none does, a block is cut once more to fit what room there is.

The published system does the same in one wave of as many tokens as a GPU holds, and colours the transfers into
congestion-free rounds, which the cost model takes for granted. Waves are ordered by the ranks they use, and used ranks
are the lowest, so every wave has the same micro-batch number on all its ranks.

Cost: O(blocks log R), Python heap.
"""

import heapq
from itertools import pairwise

import numpy as np

from bytescale.arrays import FloatArray, IntArray
from bytescale.cost.blocks import attention_s
from bytescale.plan.step_plan import StepPlan, step_plan
from bytescale.planner.parts.packing import next_fit
from bytescale.planner.problem import Problem, too_long

BLOCK_TOKENS = 4096
WAVE_FILL = 0.97
"""Share of a wave's room that is planned for, so that whole blocks nearly always fit."""


def plan_fcp(problem: Problem) -> StepPlan:
    """Place blocks.

    Raises:
        UserError: a sequence that all ranks together cannot hold.
    """
    capacity, hdp_size = problem.fixed_capacity, problem.hdp_size
    if int(problem.lengths.max()) > capacity * hdp_size:
        raise too_long(problem, int(problem.lengths.argmax()), capacity, hdp_size)
    wave = _assign_waves(problem)
    sequence, begin, end = _blocks(problem.lengths, min(BLOCK_TOKENS, capacity))
    time_s = _block_time_s(problem, begin, end)
    by_wave = np.argsort(wave[sequence], kind="stable")
    bounds = np.searchsorted(wave[sequence][by_wave], np.arange(int(wave.max()) + 2))
    placed = []
    for first, last in pairwise(bounds.tolist()):
        rows = by_wave[first:last]
        placed.append(_place_wave(sequence[rows], begin[rows], end[rows], time_s[rows], capacity, hdp_size))
    used = [int(columns[1].max()) + 1 for columns in placed]
    order = sorted(range(len(placed)), key=lambda w: (-used[w], w))
    columns = [np.concatenate([placed[w][k] for w in order]) for k in range(4)]
    micro_batch = np.repeat(np.arange(len(order)), [len(placed[w][0]) for w in order])
    return step_plan(
        strategy="fcp",
        hdp_size=hdp_size,
        tokens_per_rank=problem.tokens_per_rank,
        num_layers=problem.num_layers,
        pp_size=problem.pp_size,
        lengths=problem.lengths,
        sequence=columns[0],
        rank=columns[1],
        micro_batch=micro_batch,
        tokens=columns[3] - columns[2],
        offload_ratio=problem.fixed_ratio,
        token_begin=columns[2],
        token_end=columns[3],
    )


def _assign_waves(problem: Problem) -> IntArray:
    """Wave of each sequence: longest first, a wave is closed where the next one no longer fits."""
    planned = max(1, int(problem.fixed_capacity * problem.hdp_size * WAVE_FILL))
    order = np.argsort(-problem.lengths, kind="stable")
    wave = np.zeros(problem.num_sequences, dtype=np.int64)
    wave[order] = next_fit(problem.lengths[order], planned)
    return wave


def _blocks(lengths: IntArray, block: int) -> tuple[IntArray, IntArray, IntArray]:
    """Sequence, begin and end of every block; the last block of a sequence is what is left."""
    counts = -(-lengths // block)
    sequence = np.repeat(np.arange(len(lengths)), counts)
    begin = (np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)) * block
    return sequence, begin, np.minimum(begin + block, lengths[sequence])


def _block_time_s(problem: Problem, begin: IntArray, end: IntArray) -> FloatArray:
    """Forward time of a block in one layer: balance needs ratios only."""
    direction = problem.cost.forward
    width = (end - begin).astype(np.float64)
    attention = attention_s(problem.cost, direction, begin.astype(np.float64), end.astype(np.float64))
    return np.asarray(attention + direction.token_s * width, np.float64)


def _place_wave(
    sequence: IntArray, begin: IntArray, end: IntArray, time_s: FloatArray, capacity: int, hdp_size: int
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Columns sequence, rank, begin, end of one wave; used ranks are the lowest.

    A rank without room for a block is parked until blocks are half as wide, so each rank is looked at a few times only.
    """
    room = [capacity] * hdp_size
    heap = [(0.0, r) for r in range(hdp_size)]
    parked: list[tuple[float, int]] = []
    parked_width = 0
    rows: list[tuple[int, int, int, int]] = []
    blocks = list(zip(sequence.tolist(), begin.tolist(), end.tolist(), time_s.tolist(), strict=True))
    for k in np.argsort(-time_s, kind="stable").tolist():
        s, b, e, t = blocks[k]
        width = e - b
        if parked and 2 * width <= parked_width:
            heap += parked
            heapq.heapify(heap)
            parked, parked_width = [], 0
        while heap and room[heap[0][1]] < width:
            parked.append(heapq.heappop(heap))
            parked_width = max(parked_width, width)
        if heap:
            load, r = heapq.heappop(heap)
            rows.append((s, r, b, e))
            room[r] -= width
            if room[r]:
                heapq.heappush(heap, (load + t, r))
        else:
            # No rank looked at has the room: the block is cut over the rooms there are.
            rows += _cut_to_rooms(s, b, e, room)
            heap, parked, parked_width = [entry for entry in parked if room[entry[1]]], [], 0
            heapq.heapify(heap)
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    _, dense = np.unique(columns[1], return_inverse=True)
    return columns[0], dense.astype(np.int64), columns[2], columns[3]


def _cut_to_rooms(sequence: int, begin: int, end: int, room: list[int]) -> list[tuple[int, int, int, int]]:
    """Parts of one block on the ranks with most room."""
    parts = []
    for r in sorted(range(len(room)), key=lambda k: (-room[k], k)):
        if begin == end:
            break
        taken = min(room[r], end - begin)
        if taken:
            parts.append((sequence, r, begin, begin + taken))
            room[r] -= taken
            begin += taken
    assert begin == end, "a wave is planned for less than its ranks hold"
    return parts
