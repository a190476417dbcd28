"""Keys and values that a rank keeps of the earlier chunks of a sequence, and the gradients that later chunks add.

A sequence run in chunks (plan layout `chunks`) is computed chunk after chunk, each against the keys and values of all
earlier ones, and backwards in the reverse order. The graph is cut between chunks: attention of chunk i reads kept keys
and values without a graph and adds their gradients here; the backward of the chunk that made them, which comes later,
adds what it finds to its own.

Invariant: a chunk's gradient is complete when its backward begins, since all later chunks of its sequence are through;
it is dropped there, so nothing is left when the unit is through. Recomputation puts the same chunk twice, which changes
nothing. Memory: keys and values are those that autograd saves anyway, unless layers are recomputed; gradients are fp32
(fp64 for fp64).

Shapes: N rows of a chunk on this rank, G key/value heads, D head size.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from bytescale.runtime.attention.work import AttentionWork, KeptRows


@dataclass
class _Chunk:
    k_NGD: Tensor
    v_NGD: Tensor
    gradients: tuple[Tensor, Tensor] | None = None


@dataclass
class _Calls:
    """Attention calls of one layer for one chunk: all so far, and how many its forward made; 0 until it has ended."""

    made: int = 0
    in_forward: int = 0


class KeptKv:
    """What one rank and stage keeps during one step, by attention call: see `call`."""

    def __init__(self) -> None:
        self._chunks: dict[tuple[Hashable, int], list[_Chunk]] = {}
        self._calls: dict[tuple[int, int, int], _Calls] = {}
        self._running: list[_Calls] = []

    def __len__(self) -> int:
        """Sequences and attention calls that still keep something."""
        return len(self._chunks)

    def call(self, layer: int, work: AttentionWork) -> tuple[int, int]:
        """The name under which an attention call of `layer` that begins now keeps things: layer, number in the layer.

        A layer may call attention several times. Recomputation makes the calls of a forward once more, in order.
        """
        rows = next(iter((*work.stored, *work.kept)), None)
        if rows is None:
            return layer, 0
        calls = self._calls.setdefault((layer, rows.sequence, rows.chunk), _Calls())
        if not calls.in_forward:
            self._running.append(calls)
        number = calls.made % calls.in_forward if calls.in_forward else calls.made
        calls.made += 1
        return layer, number

    def end_forward(self) -> None:
        """The forward of a micro-batch is through: calls that follow for its chunks are recomputation."""
        for calls in self._running:
            calls.in_forward = calls.made
        self._running.clear()

    def put(self, layer: Hashable, rows: KeptRows, k_TGD: Tensor, v_TGD: Tensor) -> None:
        """Keep the rows of a chunk that later chunks will read."""
        chunks = self._chunks.setdefault((layer, rows.sequence), [])
        if rows.chunk < len(chunks):
            return  # recomputation
        assert rows.chunk == len(chunks), "chunks run in order"
        own = slice(rows.begin, rows.end)
        chunks.append(_Chunk(k_TGD[own].detach(), v_TGD[own].detach()))

    def earlier(self, layer: Hashable, rows: KeptRows) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of the chunks before number `rows.chunk`, in order."""
        chunks = self._chunks[layer, rows.sequence][: rows.chunk]
        return [chunk.k_NGD for chunk in chunks], [chunk.v_NGD for chunk in chunks]

    def drop_finished(self, work: AttentionWork) -> None:
        """Where nothing runs backwards: let go of the sequences whose last chunk this micro-batch held."""
        finished = {rows.sequence for rows in work.kept} - {rows.sequence for rows in work.stored}
        for key in [key for key in self._chunks if key[1] in finished]:
            del self._chunks[key]

    def add_gradients(self, layer: Hashable, rows: KeptRows, dk_TGD: Tensor, dv_TGD: Tensor) -> None:
        """Add the gradients of all rows of the chunks before number `rows.chunk`, which lie at `rows`."""
        begin = rows.begin
        for chunk in self._chunks[layer, rows.sequence][: rows.chunk]:
            part = slice(begin, begin + len(chunk.k_NGD))
            if chunk.gradients is None:
                chunk.gradients = dk_TGD[part].clone(), dv_TGD[part].clone()
            else:
                chunk.gradients[0].add_(dk_TGD[part])
                chunk.gradients[1].add_(dv_TGD[part])
            begin = part.stop

    def take_gradients(self, layer: Hashable, rows: KeptRows) -> tuple[Tensor, Tensor] | None:
        """What later chunks added to chunk number `rows.chunk`, which is the last one kept and is freed."""
        chunks = self._chunks[layer, rows.sequence]
        chunk = chunks.pop()
        assert rows.chunk == len(chunks), "chunks are freed in reverse"
        if not chunks:
            del self._chunks[layer, rows.sequence]
        return chunk.gradients
