"""Measures what the cost model needs on this machine: layers, attention blocks, activations, head, links, copies.

The layer is the second of a two-layer model of the real sizes, called as training calls it; hooks on it and on its
hidden states mark where its forward and backward begin and end, so neither embedding nor head is in them. Every point
is the best of several runs, in rounds over all points, so that a disturbance of the machine does not hit one length
only. Links are measured as a ring step uses them: both ends send and receive at once. Copies go through the offload
tier itself, each direction alone and both together.

Invariant: nothing here decides; numbers go to `bytescale.cost.profile`, which fits them. Cost: about
`rounds` times the step time of two layers at every length; one layer's activations at the longest length in memory.

Shapes: T rows, H query heads, G key/value heads, D head size, E hidden size, V vocabulary.
"""

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from bytescale.config.schema import ModelConfig
from bytescale.cost.model import ModelShape
from bytescale.runtime.attention.context import AttentionContext
from bytescale.runtime.attention.interface import AttentionKernel, QuerySide
from bytescale.runtime.attention.work import Block, local_work
from bytescale.runtime.model.decoder import LossModel, build_decoder
from bytescale.runtime.model.loss import token_loss_sum
from bytescale.runtime.offload.tiers import Copy, Partition, Tier
from bytescale.runtime.p2p import PeerToPeer
from bytescale.runtime.transport import Message

Table = dict[str, list[float]]

MEASURED_LAYER = 1
LINK_BYTES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)
COPY_TENSOR_BYTES, NUM_COPY_TENSORS = 8 << 20, 16


class Clock:
    """Points in time on the compute side: events on CUDA, else seconds.

    With one compute thread these are the thread's own CPU time, which other processes of the machine disturb far less
    than wall time; with more, or where waiting counts, wall time.
    """

    def __init__(self, device: torch.device, *, waiting_counts: bool = False) -> None:
        self._device = device
        own = device.type == "cpu" and torch.get_num_threads() == 1 and not waiting_counts
        self._seconds = time.thread_time if own else time.perf_counter

    def mark(self) -> Any:
        if self._device.type != "cuda":
            return self._seconds()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        if self._device.type != "cuda":
            return float(end - begin)
        torch.cuda.synchronize(self._device)
        return float(begin.elapsed_time(end)) / 1e3

    def time(self, function: Callable[[], Any]) -> float:
        begin = self.mark()
        function()
        return self.seconds(begin, self.mark())


def length_grid(longest: int, shortest: int = 256) -> tuple[list[int], list[int]]:
    """(lengths to fit, held-out lengths): factors of sqrt(2) from `shortest` up, and points between some of them."""
    lengths, length = [], float(min(shortest, longest))
    while length < longest * 0.99:
        lengths.append(round(length))
        length *= 2**0.5
    lengths.append(longest)
    between = [round((a * b) ** 0.5) for a, b in pairwise(lengths)]
    return lengths, between[1::3]


def two_layers(config: Any, device: torch.device, dtype: torch.dtype) -> LossModel:
    """A model of the sizes of `config` with two layers and random weights."""
    short = copy.deepcopy(config)
    short.num_hidden_layers = 2
    if getattr(short, "layer_types", None):
        short.layer_types = short.layer_types[:2]
    decoder = build_decoder(ModelConfig(config={"model_type": config.model_type}), short, 0)
    return LossModel(decoder.to(device=device, dtype=dtype).train())


@dataclass
class _LayerProbe:
    """Marks of one pass through the measured layer, and the storages it saved."""

    clock: Clock
    marks: dict[str, Any] = field(default_factory=dict)
    inside: bool = False
    saved: dict[int, tuple[Tensor, int]] = field(default_factory=dict)

    @contextmanager
    def on(self, layer: Any) -> Any:
        handles = [layer.register_forward_pre_hook(self._before), layer.register_forward_hook(self._after)]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, _: Any, arguments: tuple[Any, ...]) -> None:
        arguments[0].register_hook(lambda _: self.marks.update(backward_end=self.clock.mark()))
        self.inside = True
        self.marks["forward_begin"] = self.clock.mark()

    def _after(self, _: Any, __: Any, output: Any) -> None:
        self.marks["forward_end"] = self.clock.mark()
        self.inside = False
        hidden = output[0] if isinstance(output, tuple) else output
        hidden.register_hook(lambda _: self.marks.update(backward_begin=self.clock.mark()))

    def pack(self, tensor: Tensor) -> Tensor:
        if self.inside:
            storage = tensor.untyped_storage()
            self.saved[storage.data_ptr()] = tensor, storage.nbytes()
        return tensor


def _pass(model: LossModel, length: int, kernel: AttentionKernel, probe: _LayerProbe) -> None:
    """Forward and backward of the layers alone, on one sequence."""
    device = next(model.parameters()).device
    comm = PeerToPeer(None, 1.0, device)
    context = AttentionContext(local_work([length]), kernel, comm)
    ids_T = torch.arange(length, device=device) % model.decoder.config.vocab_size
    with probe.on(model.layers[MEASURED_LAYER]):
        hidden_TE = model.hidden_states(ids_T, torch.arange(length, device=device), context)
        hidden_TE.backward(torch.ones_like(hidden_TE))


def measure_layer(
    model: LossModel, kernel: AttentionKernel, lengths: Sequence[int], clock: Clock, rounds: int
) -> Table:
    """Best forward and backward time of the measured layer at every length."""
    best = {length: [float("inf"), float("inf")] for length in lengths}
    for number in range(rounds + 1):
        for length in lengths:
            probe = _LayerProbe(clock)
            _pass(model, length, kernel, probe)
            if number == 0:
                continue  # warm-up
            for i, what in enumerate(("forward", "backward")):
                seconds = clock.seconds(probe.marks[f"{what}_begin"], probe.marks[f"{what}_end"])
                best[length][i] = min(best[length][i], seconds)
    return {
        "length": [float(length) for length in lengths],
        "forward_s": [best[length][0] for length in lengths],
        "backward_s": [best[length][1] for length in lengths],
    }


def measure_activations(model: LossModel, kernel: AttentionKernel, lengths: Sequence[int], clock: Clock) -> Table:
    """Bytes that the measured layer saves for its backward, each storage once, parameters excluded."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    num_bytes = []
    for length in lengths:
        probe = _LayerProbe(clock)
        with saved_tensors_hooks(probe.pack, lambda tensor: tensor):
            _pass(model, length, kernel, probe)
        num_bytes.append(float(sum(size for address, (_, size) in probe.saved.items() if address not in own)))
    return {"length": [float(length) for length in lengths], "num_bytes": num_bytes}


def measure_blocks(
    shape: ModelShape, kernel: AttentionKernel, edges: Sequence[int], clock: Clock, rounds: int, like: Tensor
) -> Table:
    """Attention of every pair of query and key/value lengths, as a ring step computes it: not causal."""
    table: Table = {name: [] for name in ("q_len", "kv_len", "forward_s", "backward_s")}
    scale = shape.head_dim**-0.5
    for q_len in edges:
        for kv_len in edges:
            q_THD = like.new_empty(q_len, shape.num_heads, shape.head_dim).normal_()
            k_SGD, v_SGD = (like.new_empty(kv_len, shape.num_kv_heads, shape.head_dim).normal_() for _ in range(2))
            call = kernel.prepare((Block(0, q_len, 0, kv_len),), causal=False)
            out_THD, lse_TH = kernel.forward(q_THD, k_SGD, v_SGD, call, scale)
            queries = QuerySide(q_THD, out_THD, lse_TH, torch.ones_like(out_THD))
            forward_s = min(
                clock.time(lambda: kernel.forward(q_THD, k_SGD, v_SGD, call, scale))  # noqa: B023
                for _ in range(rounds + 1)
            )
            backward_s = min(
                clock.time(lambda: kernel.backward(queries, k_SGD, v_SGD, call, scale))  # noqa: B023
                for _ in range(rounds + 1)
            )
            for name, value in zip(table, (q_len, kv_len, forward_s, backward_s), strict=True):
                table[name].append(float(value))
    return table


def measure_head(shape: ModelShape, lengths: Sequence[int], clock: Clock, rounds: int, like: Tensor) -> Table:
    """Head and loss of a micro-batch, at every number of targets."""
    table: Table = {name: [] for name in ("length", "forward_s", "backward_s")}
    head_VE = (like.new_empty(shape.vocab_size, shape.hidden_size).normal_() * 0.02).requires_grad_()
    for length in lengths:
        best = [float("inf"), float("inf")]
        labels_T = torch.arange(length, device=like.device) % shape.vocab_size
        for _ in range(rounds + 1):
            hidden_TE = like.new_empty(length, shape.hidden_size).normal_().requires_grad_()
            marks = [clock.mark()]
            loss = token_loss_sum(hidden_TE, head_VE, labels_T)
            marks.append(clock.mark())
            loss.backward()
            marks.append(clock.mark())
            best = [min(best[i], clock.seconds(marks[i], marks[i + 1])) for i in range(2)]
        for name, value in zip(table, (length, *best), strict=True):
            table[name].append(float(value))
    return table


def measure_embedding(shape: ModelShape, length: int, clock: Clock, rounds: int, like: Tensor) -> Table:
    """Seconds a token of a lookup and of the dense gradient of the table."""
    embedding = torch.nn.Embedding(shape.vocab_size, shape.hidden_size, device=like.device, dtype=like.dtype)
    tokens_T = torch.arange(length, device=like.device) % shape.vocab_size
    best = [float("inf"), float("inf")]
    for _ in range(rounds + 1):
        marks = [clock.mark()]
        hidden_TE = embedding(tokens_T)
        marks.append(clock.mark())
        hidden_TE.backward(torch.ones_like(hidden_TE))
        marks.append(clock.mark())
        best = [min(best[i], clock.seconds(marks[i], marks[i + 1])) for i in range(2)]
    return {"forward_token_s": [best[0] / length], "backward_token_s": [best[1] / length]}


def measure_link(comm: PeerToPeer, peer: int, device: torch.device, clock: Clock, repeats: int = 12) -> Table:
    """Time of an exchange with `peer`, which must call this too, at every size in bytes each way."""
    table: Table = {"num_bytes": [], "time_s": []}
    for num_bytes in LINK_BYTES:
        outgoing, incoming = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))

        def exchange(outgoing: Tensor = outgoing, incoming: Tensor = incoming) -> None:
            comm.wait(comm.post("link", [Message(peer, outgoing, 0)], [Message(peer, incoming, 0)]))
            comm.drain()

        times = [clock.time(exchange) for _ in range(repeats)]
        table["num_bytes"].append(float(num_bytes))
        table["time_s"].append(min(times[2:]))
    return table


def measure_copies(tier: Tier, device: torch.device) -> Table:
    """Bytes per second out and in through `tier`: each direction alone, then both at once. Warm."""
    sources = [torch.ones(COPY_TENSOR_BYTES, dtype=torch.uint8, device=device) for _ in range(NUM_COPY_TENSORS)]
    cut = Partition(((0, COPY_TENSOR_BYTES),), ())

    def out() -> list[Any]:
        stashes = [tier.store(source, cut) for source in sources]
        return [stash for stash in stashes if stash is not None]

    def back(stashes: list[Any]) -> None:
        for stash in stashes:
            stash.settle()
            stash.recall()

    def finish(stashes: list[Any]) -> None:
        for stash in stashes:
            stash.take()
            stash.discard()

    rates: dict[str, float] = {}
    for _ in range(2):  # the first writes to a fresh file are several times slower
        for name, both in (("alone", False), ("both", True)):
            tier.begin_step()
            first = out()
            if not both:
                tier.copies()  # waits, so that nothing overlaps
            second = out() if both else []
            back(first)
            finish(first)
            back(second)
            finish(second)
            copies = tier.copies()
            rates[f"out_{name}"], rates[f"in_{name}"] = _rate(copies, "out"), _rate(copies, "in")
    return {name: [rates[name]] for name in ("out_alone", "in_alone", "out_both", "in_both")}


def _rate(copies: Sequence[Copy], direction: str) -> float:
    """Bytes per second while that direction was busy."""
    chosen = [c for c in copies if c.direction == direction]
    return sum(c.num_bytes for c in chosen) / max(1e-9, sum(c.duration_s for c in chosen))
