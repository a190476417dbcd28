"""What one micro-batch exchanges and computes in attention, ring step by ring step. Torch-free index arithmetic.

A sequence of D ranks needs D - 1 ring steps. At step j the rank with cp_index k computes with the keys and values (KV)
of index (k - j) mod D and sends its own KV to index (k + j) mod D, directly rather than hop by hop. Under the zig-zag
layout causality decides how much is needed (`bytescale.layout`; front and back are the two runs of a piece):

    source < consumer:   all queries of the consumer  x  the front run of the source
    source > consumer:   the back queries of the consumer  x  the whole piece of the source

so direct sends move about 3/4 of what passing every block around the ring moves, and each partial dKV comes from one
kernel call, travels once in the model's type without loss, and is summed by its owner in fp32 in a fixed order.

All rings of a micro-batch advance together: step j of every sequence is one exchange (one parcel per pair of ranks) and
one batch of kernel calls. Invariant that excludes deadlock: every rank orders its exchanges by (step, kind), the
members of a gang run the same steps, and both ends of a parcel derive it from the plan alone. Cost: O(sum of degrees)
small Python objects per micro-batch, built once and used by every layer.
"""

from collections import defaultdict
from dataclasses import dataclass

from bytescale.layout import PieceRuns, piece_runs
from bytescale.plan import StepPlan

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
        ranges: of a send, rows of the micro-batch; of a receive, rows of the receive buffer (always one range).
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
class AttentionLayout:
    """All attention work of one micro-batch of one rank.

    Attributes:
        num_tokens: rows of the micro-batch, T.
        local: causal blocks, one a piece, covering rows 0..T-1 in order.
        steps: ring steps 1, 2, ...; empty when every sequence is whole on this rank.
        early_causal, early_full, late_causal: `local` once more, cut so that the backward of a multi-rank piece leaves
            (back queries x back keys) for the end, to compute while the last dKV travels.
    """

    num_tokens: int
    local: tuple[Block, ...]
    steps: tuple[RingStep, ...]
    early_causal: tuple[Block, ...]
    early_full: tuple[Block, ...]
    late_causal: tuple[Block, ...]


@dataclass(frozen=True)
class _Member:
    """One piece of this micro-batch: its place in the buffer and the ranks that share its sequence."""

    sequence: int
    length: int
    cp_index: int
    ranks: tuple[int, ...]
    offset: int

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


def attention_layouts(plan: StepPlan, rank: int) -> list[AttentionLayout]:
    """The layouts of all micro-batches of `rank`, in order of execution. Zig-zag plans only."""
    assert plan.pieces.cp_index is not None, "block plans have no ring"
    rows, begin = plan.sequence_rows()
    layouts = []
    for micro_batch in plan.micro_batch_rows(rank):
        members, offset = [], 0
        for row in micro_batch.tolist():
            sequence = int(plan.pieces.sequence[row])
            ranks = plan.pieces.rank[rows[begin[sequence] : begin[sequence + 1]]].tolist()
            members.append(
                _Member(sequence, int(plan.lengths[sequence]), int(plan.pieces.cp_index[row]), tuple(ranks), offset)
            )
            offset += int(plan.pieces.tokens[row])
        layouts.append(_layout(members, offset))
    return layouts


def local_layout(lengths: list[int]) -> AttentionLayout:
    """The layout of whole sequences packed on one rank: no ring."""
    members, offset = [], 0
    for sequence, length in enumerate(lengths):
        members.append(_Member(sequence, length, 0, (0,), offset))
        offset += length
    return _layout(members, offset)


def _layout(members: list[_Member], num_tokens: int) -> AttentionLayout:
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
    return AttentionLayout(
        num_tokens=num_tokens,
        local=_without_empty(local),
        steps=tuple(_ring_step(members, step) for step in range(1, num_steps + 1)),
        early_causal=_without_empty(early_causal),
        early_full=_without_empty(early_full),
        late_causal=_without_empty(late_causal),
    )


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
