"""What one micro-batch exchanges and computes in attention, ring step by ring step. Torch-free index arithmetic.

A sequence of D ranks needs D - 1 ring steps. At step j the rank with cp_index k computes with the keys and values (KV)
of index (k - j) mod D and sends its own KV to index (k + j) mod D, directly rather than hop by hop. Under the zig-zag
layout causality decides how much is needed (`bytescale.plan.zigzag`; front and back are the two runs of a piece):

    source < consumer:   all queries of the consumer  x  the front run of the source
    source > consumer:   the back queries of the consumer  x  the whole piece of the source

so direct sends move about 3/4 of what passing every block around the ring moves, and each partial dKV comes from one
kernel call, travels once in the model's type without loss, and is summed by its owner in fp32 in a fixed order.

A chunk of a sequence (plan layout `chunks`) has kept rows as well: keys and values of the earlier chunks on each rank,
which follow the rows of the micro-batch in one source buffer. All queries of the chunk see all of them, so every step
carries them whole.

All rings of a micro-batch advance together: step j of every sequence is one exchange (one parcel per pair of ranks) and
one batch of kernel calls. Invariant that excludes deadlock: every rank orders its exchanges by (step, kind), the
members of a gang run the same steps, and both ends of a parcel derive it from the plan alone. Cost: O(sum of degrees)
small Python objects per micro-batch, built once and used by every layer.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bytescale.arrays import IntArray
from bytescale.plan.share import MicroBatchShare, rank_share
from bytescale.plan.step_plan import StepPlan
from bytescale.plan.zigzag import PieceRuns, piece_runs

Range = tuple[int, int]


@dataclass(frozen=True)
class Block:
    """One kernel call: query rows [q_begin, q_end) against key/value rows [kv_begin, kv_end)."""

    q_begin: int
    q_end: int
    kv_begin: int
    kv_end: int


@dataclass(frozen=True)
class Parcel:
    """One message between this rank and `peer`: row ranges, in ascending order of sequence.

    Attributes:
        sequence: first sequence in it, for error messages.
        ranges: of a send, rows of the source buffer; of a receive, rows of the receive buffer (always one range).
    """

    peer: int
    sequence: int
    ranges: tuple[Range, ...]

    @property
    def num_tokens(self) -> int:
        return sum(end - begin for begin, end in self.ranges)


@dataclass(frozen=True)
class RingStep:
    """Ring step j of all sequences of a micro-batch.

    In the forward `sends` carry KV out and `receives` bring KV in; in the backward the partial dKV of the received rows
    go back to where they came from and arrive for the rows that were sent. Key/value rows of `blocks` count in the
    receive buffer, and the blocks lie in its order without gaps.
    """

    sends: tuple[Parcel, ...]
    receives: tuple[Parcel, ...]
    blocks: tuple[Block, ...]

    @property
    def num_received_tokens(self) -> int:
        return sum(parcel.num_tokens for parcel in self.receives)


@dataclass(frozen=True)
class KeptRows:
    """Rows [begin, end) of the source buffer that belong to chunk number `chunk` of a sequence, or to all before it."""

    sequence: int
    chunk: int
    begin: int
    end: int


@dataclass(frozen=True)
class AttentionWork:
    """All attention work of one micro-batch of one rank.

    The source buffer holds the T rows of the micro-batch, then what is kept of earlier chunks.

    Attributes:
        num_tokens: rows of the micro-batch, T.
        local: causal blocks, one a piece, covering rows 0..T-1 in order.
        steps: ring steps 1, 2, ...; empty when every sequence is whole on this rank.
        early_causal, early_full, late_causal: `local` once more, cut so that the backward of a multi-rank piece leaves
            (back queries x back keys) for the end, to compute while the last dKV travels.
        kept: where the rows kept of each sequence's earlier chunks lie in the source buffer.
        kept_blocks: queries of a chunk against them.
        stored: rows of the micro-batch that later chunks will read.
    """

    num_tokens: int
    local: tuple[Block, ...]
    steps: tuple[RingStep, ...]
    early_causal: tuple[Block, ...]
    early_full: tuple[Block, ...]
    late_causal: tuple[Block, ...]
    kept: tuple[KeptRows, ...] = ()
    kept_blocks: tuple[Block, ...] = ()
    stored: tuple[KeptRows, ...] = ()


@dataclass(frozen=True)
class _Member:
    """One piece of this micro-batch: its place in the buffer and the ranks that share its sequence or chunk.

    Attributes:
        length: of the sequence or chunk.
        chunk: number of the chunk; is_last: whether no other follows.
        num_kept: tokens of the earlier chunks on each of the ranks; () without any.
        kept_offset: where those of this rank begin in the source buffer.
    """

    sequence: int
    length: int
    cp_index: int
    ranks: tuple[int, ...]
    offset: int
    chunk: int = 0
    is_last: bool = True
    num_kept: tuple[int, ...] = ()
    kept_offset: int = 0

    def kept_on(self, cp_index: int) -> int:
        return self.num_kept[cp_index] if self.num_kept else 0

    def runs(self, cp_index: int) -> PieceRuns:
        return piece_runs(self.length, len(self.ranks), cp_index)


def needed_rows(source: int, consumer: int, source_runs: PieceRuns, consumer_runs: PieceRuns) -> tuple[int, int]:
    """What `consumer` computes with KV of `source`, both cp_index of one sequence.

    Returns:
        (number of leading rows of the source's piece, first query row of the consumer's piece); (0, _) when there is
        nothing to compute, and then nothing is sent.
    """
    if source < consumer:
        return (source_runs.num_front_tokens if consumer_runs.num_tokens else 0), 0
    return (source_runs.num_tokens if consumer_runs.num_back_tokens else 0), consumer_runs.num_front_tokens


def attention_work(plan: StepPlan, rank: int) -> list[AttentionWork]:
    """The work of all micro-batches of `rank`, in order of execution. Plans with zig-zag pieces only."""
    return [micro_batch_work(micro_batch) for micro_batch in rank_share(plan, rank)]


def micro_batch_work(micro_batch: MicroBatchShare) -> AttentionWork:
    """The work of one micro-batch of a plan with zig-zag pieces."""
    plan = micro_batch.plan
    assert plan.pieces.cp_index is not None, "block plans have no ring"
    members: list[_Member] = []
    offset = num_tokens = micro_batch.num_tokens
    for row, rows in zip(micro_batch.rows.tolist(), micro_batch.sequence_rows, strict=True):
        member = _member(plan, row, rows)
        before = members[-1].offset + members[-1].runs(members[-1].cp_index).num_tokens if members else 0
        members.append(replace(member, offset=before, kept_offset=offset))
        offset += member.kept_on(member.cp_index)
    return _work(members, num_tokens)


def _member(plan: StepPlan, row: int, rows: IntArray) -> _Member:
    """The piece at `row`; `rows` are those of its sequence in the order of `StepPlan.sequence_rows`."""
    pieces = plan.pieces
    assert pieces.cp_index is not None
    sequence, cp_index = int(pieces.sequence[row]), int(pieces.cp_index[row])
    if pieces.token_begin is None or pieces.token_end is None:
        return _Member(sequence, int(plan.lengths[sequence]), cp_index, tuple(pieces.rank[rows].tolist()), 0)
    begins, own = pieces.token_begin[rows], int(pieces.token_begin[row])
    ranks = pieces.rank[rows[begins == own]]
    kept = np.bincount(pieces.cp_index[rows], weights=pieces.tokens[rows] * (begins < own), minlength=len(ranks))
    return _Member(
        sequence,
        int(pieces.token_end[row]) - own,
        cp_index,
        tuple(ranks.tolist()),
        offset=0,
        chunk=len(np.unique(begins[begins < own])),
        is_last=own == int(begins.max()),
        num_kept=tuple(kept.astype(np.int64).tolist()) if kept.any() else (),
    )


def local_work(lengths: list[int]) -> AttentionWork:
    """The work of whole sequences packed on one rank: no ring."""
    members, offset = [], 0
    for sequence, length in enumerate(lengths):
        members.append(_Member(sequence, length, 0, (0,), offset))
        offset += length
    return _work(members, offset)


def _work(members: list[_Member], num_tokens: int) -> AttentionWork:
    local, early_causal, early_full, late_causal = [], [], [], []
    for m in members:
        runs = m.runs(m.cp_index)
        middle, end = m.offset + runs.num_front_tokens, m.offset + runs.num_tokens
        local.append(Block(m.offset, end, m.offset, end))
        if len(m.ranks) == 1:
            early_causal.append(local[-1])
            continue
        early_causal.append(Block(m.offset, middle, m.offset, middle))
        early_full.append(Block(middle, end, m.offset, middle))
        late_causal.append(Block(middle, end, middle, end))
    num_steps = max((len(m.ranks) for m in members), default=1) - 1
    return AttentionWork(
        num_tokens=num_tokens,
        local=_without_empty(local),
        steps=tuple(_ring_step(members, step) for step in range(1, num_steps + 1)),
        early_causal=_without_empty(early_causal),
        early_full=_without_empty(early_full),
        late_causal=_without_empty(late_causal),
        **_kept(members),
    )


def _kept(members: list[_Member]) -> dict[str, Any]:
    """What the chunks among `members` read from earlier ones and keep for later ones."""
    kept, blocks, stored = [], [], []
    for m in members:
        end = m.offset + m.runs(m.cp_index).num_tokens
        if num_kept := m.kept_on(m.cp_index):
            kept.append(KeptRows(m.sequence, m.chunk, m.kept_offset, m.kept_offset + num_kept))
            blocks.append(Block(m.offset, end, kept[-1].begin, kept[-1].end))
        if not m.is_last:
            stored.append(KeptRows(m.sequence, m.chunk, m.offset, end))
    return {"kept": tuple(kept), "kept_blocks": _without_empty(blocks), "stored": tuple(stored)}


def _without_empty(blocks: list[Block]) -> tuple[Block, ...]:
    return tuple(b for b in blocks if b.q_end > b.q_begin and b.kv_end > b.kv_begin)


def _ring_step(members: list[_Member], step: int) -> RingStep:
    sends: dict[int, list[tuple[int, Range]]] = defaultdict(list)
    receives: dict[int, list[tuple[int, int, Range]]] = defaultdict(list)
    for m in members:
        degree = len(m.ranks)
        if step >= degree:
            continue
        own = m.runs(m.cp_index)
        target, source = (m.cp_index + step) % degree, (m.cp_index - step) % degree
        if num_kept := m.kept_on(m.cp_index):
            sends[m.ranks[target]].append((m.sequence, (m.kept_offset, m.kept_offset + num_kept)))
        if num_kept := m.kept_on(source):
            receives[m.ranks[source]].append((m.sequence, num_kept, (m.offset, m.offset + own.num_tokens)))
        num_sent, _ = needed_rows(m.cp_index, target, own, m.runs(target))
        if num_sent:
            sends[m.ranks[target]].append((m.sequence, (m.offset, m.offset + num_sent)))
        num_received, q_begin = needed_rows(source, m.cp_index, m.runs(source), own)
        if num_received:
            queries = (m.offset + q_begin, m.offset + own.num_tokens)
            receives[m.ranks[source]].append((m.sequence, num_received, queries))
    parcels, blocks, filled = [], [], 0
    for peer in sorted(receives):
        begin = filled
        for _, num_tokens, (q_begin, q_end) in receives[peer]:
            blocks.append(Block(q_begin, q_end, filled, filled + num_tokens))
            filled += num_tokens
        parcels.append(Parcel(peer, receives[peer][0][0], ((begin, filled),)))
    return RingStep(
        sends=tuple(
            Parcel(peer, entries[0][0], tuple(r for _, r in entries)) for peer, entries in sorted(sends.items())
        ),
        receives=tuple(parcels),
        blocks=tuple(blocks),
    )
