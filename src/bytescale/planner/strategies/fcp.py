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
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from bytescale.arrays import FloatArray, IntArray, ceil_div
from bytescale.cost.blocks import attention_s
from bytescale.plan.step_plan import StepPlan, step_plan
from bytescale.planner.parts.packing import next_fit
from bytescale.planner.parts.rows import spread
from bytescale.planner.problem import Problem, too_long

BLOCK_TOKENS = 4096
OWN_SETTING = "fcp-32k"
OWN_TOKENS_PER_RANK = 32 * 1024
"""Tokens a GPU of the published system; a row of this name has them whatever the others have."""

WAVE_FILL = 0.97
"""Share of a wave's room that is planned for, so that whole blocks nearly always fit."""


@dataclass(frozen=True)
class _Blocks:
    """Tokens begin..end-1 of a sequence, each column of shape [num_blocks]."""

    sequence: IntArray
    begin: IntArray
    end: IntArray

    def of(self, rows: IntArray) -> "_Blocks":
        return _Blocks(self.sequence[rows], self.begin[rows], self.end[rows])


@dataclass(frozen=True)
class _PlacedWave:
    """Blocks of one wave, some cut once more, and the rank of each; used ranks are the lowest. Shape [num_blocks]."""

    blocks: _Blocks
    rank: IntArray

    @property
    def num_ranks(self) -> int:
        return int(self.rank.max()) + 1


def in_own_setting(problem: Problem) -> Problem:
    """The same question with the memory that the source has: more waves fit into one."""
    return replace(problem, tokens_per_rank=max(problem.tokens_per_rank, OWN_TOKENS_PER_RANK))


def plan_fcp(problem: Problem) -> StepPlan:
    """Place blocks.

    Raises:
        UserError: a sequence that all ranks together cannot hold.
    """
    capacity, hdp_size = problem.fixed_capacity, problem.hdp_size
    if int(problem.lengths.max()) > capacity * hdp_size:
        raise too_long(problem, int(problem.lengths.argmax()), capacity, hdp_size)
    blocks = _blocks(problem.lengths, min(BLOCK_TOKENS, capacity))
    time_s = _block_time_s(problem, blocks)
    wave = _assign_waves(problem)[blocks.sequence]
    by_wave = np.argsort(wave, kind="stable")
    bounds = np.searchsorted(wave[by_wave], np.arange(int(wave.max()) + 2))
    waves = []
    for first, last in pairwise(bounds.tolist()):
        rows = by_wave[first:last]
        waves.append(_place_wave(blocks.of(rows), time_s[rows], capacity, hdp_size))
    # `sorted` is stable: of equally wide waves the first stays first.
    waves = sorted(waves, key=lambda placed: -placed.num_ranks)
    micro_batch = np.repeat(np.arange(len(waves)), [len(placed.rank) for placed in waves])
    begin = np.concatenate([placed.blocks.begin for placed in waves])
    end = np.concatenate([placed.blocks.end for placed in waves])
    return step_plan(
        strategy="fcp",
        hdp_size=hdp_size,
        tokens_per_rank=problem.tokens_per_rank,
        num_layers=problem.num_layers,
        pp_size=problem.pp_size,
        lengths=problem.lengths,
        sequence=np.concatenate([placed.blocks.sequence for placed in waves]),
        rank=np.concatenate([placed.rank for placed in waves]),
        micro_batch=micro_batch,
        tokens=end - begin,
        offload_ratio=problem.fixed_ratio,
        token_begin=begin,
        token_end=end,
    )


def _assign_waves(problem: Problem) -> IntArray:
    """Wave of each sequence: longest first, a wave is closed where the next one no longer fits."""
    planned = max(1, int(problem.fixed_capacity * problem.hdp_size * WAVE_FILL))
    order = np.argsort(-problem.lengths, kind="stable")
    wave = np.zeros(problem.num_sequences, dtype=np.int64)
    wave[order] = next_fit(problem.lengths[order], planned)
    return wave


def _blocks(lengths: IntArray, block_tokens: int) -> _Blocks:
    """Every sequence cut into blocks; the last block of a sequence is what is left."""
    sequence, index = spread(ceil_div(lengths, block_tokens))
    begin = index * block_tokens
    return _Blocks(sequence, begin, np.minimum(begin + block_tokens, lengths[sequence]))


def _block_time_s(problem: Problem, blocks: _Blocks) -> FloatArray:
    """Forward time of each block in one layer: balance needs ratios only."""
    direction = problem.cost.forward
    begin, end = blocks.begin.astype(np.float64), blocks.end.astype(np.float64)
    attention = attention_s(problem.cost, direction, begin, end)
    return np.asarray(attention + direction.token_s * (end - begin), np.float64)


def _place_wave(blocks: _Blocks, time_s: FloatArray, capacity: int, hdp_size: int) -> _PlacedWave:
    """Blocks longest first on the least loaded rank that holds them.

    A rank without room for a block is parked until blocks are half as wide, so each rank is looked at a few times only.
    """
    room = [capacity] * hdp_size
    heap = [(0.0, r) for r in range(hdp_size)]
    parked: list[tuple[float, int]] = []
    parked_width = 0
    rows: list[tuple[int, int, int, int]] = []
    order = np.argsort(-time_s, kind="stable")
    ordered = blocks.of(order)
    columns = (ordered.sequence, ordered.begin, ordered.end, time_s[order])
    for s, b, e, t in zip(*(column.tolist() for column in columns), strict=True):
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
    sequence, rank, begin, end = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    _, dense = np.unique(rank, return_inverse=True)
    return _PlacedWave(_Blocks(sequence, begin, end), dense.astype(np.int64))


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
