"""Selective activation offloading: part of what autograd saves leaves the device and comes back in time.

Paper, section 3: a share r of the activations of a piece leaves while compute goes on. The last `NUM_RESIDENT_LAYERS`
layers stay, so a rank of l layers holds (2 + (1 - r)(l - 2)) / l of its activations, which is what rule 2 of
`plan.validate` counts. What layer i saved leaves while layers i and i + 1 compute and is dropped when layer i + 1
is done; in the backward, the first tensor of layer i that is asked for starts the return of layer i - 1.

How: `torch.autograd.graph.saved_tensors_hooks` around the forward of one micro-batch, and forward hooks on the decoder
layers that count how many are done. Each micro-batch has a state of its own, so forwards and backwards of several may
interleave. With activation checkpointing only the inputs of layers are seen; what is recomputed never comes here.

What moves is a *storage*, once, however many tensors view it; each tensor comes back with its own offset, shape and
strides. The first ceil(r * n) rows of a piece of n tokens leave; the rest is copied to storage of its own, since a
view would keep all of it. Never moved: parameters (known by storage, FSDP2 hands out views), what every layer is given
besides the hidden state (rotary tables), storages below a size floor, tensors on other devices.

Invariant: every tensor comes back bit for bit, so gradients equal those without offloading. No room, a failed write:
the storage stays and is counted as declined. Cost: one Python call a saved tensor.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from bytescale.plan.memory import NUM_RESIDENT_LAYERS
from bytescale.runtime.model.decoder import LossModel
from bytescale.runtime.offload.tiers import Copy, LeavingRows, Stash, Tier, leaving_rows, partition
from bytescale.runtime.sharded import local_tensor


@dataclass(frozen=True)
class OffloadReport:
    """What one rank offloaded in one step.

    Attributes:
        bytes_out, bytes_in: moved away and back.
        exposed_s: time that compute stood still for copies.
        declined_bytes: meant to leave but stayed, for want of room or after a failed write.
        copies: every transfer.
        waits: (begin, seconds) of every exposed wait, `perf_counter` seconds.
    """

    bytes_out: int = 0
    bytes_in: int = 0
    exposed_s: float = 0.0
    declined_bytes: int = 0
    copies: tuple[Copy, ...] = ()
    waits: tuple[tuple[float, float], ...] = ()


class Offloader:
    """Offloading of one model on one rank: its hooks, its tier, what it counted in this step."""

    def __init__(self, model: LossModel, make_tier: Callable[[], Tier], min_bytes: int) -> None:
        """Hook the layers of `model`, after it was sharded.

        Args:
            model: the model; the tier belongs to its device.
            make_tier: opens the tier when something is to leave for the first time.
            min_bytes: storages below that stay.
        """
        self._model, self._make_tier, self._min_bytes = model, make_tier, min_bytes
        self._tier: Tier | None = None
        self._active: _MicroBatch | None = None
        self._parameters: frozenset[int] = frozenset()
        self._device = torch.device("cpu")
        self._declined_bytes = 0
        self._waits: list[tuple[Any, Any]] = []
        self._handles = [layer.register_forward_pre_hook(self._before, with_kwargs=True) for layer in model.layers]
        self._handles += [layer.register_forward_hook(self._after) for layer in model.layers]

    def begin_step(self) -> None:
        """Start a step; parameters must be whole: their storages are remembered until the next one."""
        parameters = [*map(local_tensor, self._model.parameters()), *self._model.buffers()]
        self._device, self._parameters = parameters[0].device, frozenset(map(_address, parameters))
        self._declined_bytes, self._waits = 0, []
        if self._tier is not None:
            self._tier.begin_step()

    @contextmanager
    def micro_batch(self, tokens: Sequence[int], offload_ratio: Sequence[float]) -> Iterator[None]:
        """Around the forward of one micro-batch with these pieces; its backward may run any time later."""
        leaving = leaving_rows(tokens, offload_ratio)
        num_layers = len(self._model.layers)
        if not leaving.rows or num_layers <= NUM_RESIDENT_LAYERS:
            yield
            return
        if self._tier is None:
            self._tier = self._make_tier()
            self._tier.begin_step()
        self._tier.engage()
        state = _MicroBatch(self, self._tier, leaving, num_layers)
        self._active = state
        try:
            with saved_tensors_hooks(state.pack, _unpack):
                yield
        finally:
            self._active = None
            state.end_forward()

    def end_step(self) -> None:
        """Nothing leaves any more; the host goes on at once."""
        if self._tier is not None:
            self._tier.end_step()

    def report(self) -> OffloadReport:
        """What was moved since `begin_step`; ends the step and waits for it, copies and device."""
        if self._tier is None:
            return OffloadReport(declined_bytes=self._declined_bytes)
        self.end_step()
        copies = self._tier.copies()
        at_s = [(self._tier.clock.at_ns(begin) / 1e9, self._tier.clock.at_ns(end) / 1e9) for begin, end in self._waits]
        waits = tuple((begin_s, end_s - begin_s) for begin_s, end_s in at_s)
        return OffloadReport(
            bytes_out=sum(c.num_bytes for c in copies if c.direction == "out"),
            bytes_in=sum(c.num_bytes for c in copies if c.direction == "in"),
            exposed_s=sum(duration_s for _, duration_s in waits),
            declined_bytes=self._declined_bytes,
            copies=tuple(copies),
            waits=waits,
        )

    def close(self) -> None:
        """Take the hooks off and give the tier back."""
        for handle in self._handles:
            handle.remove()
        if self._tier is not None:
            self._tier.close()
            self._tier = None

    def may_move(self, tensor: Tensor) -> bool:
        """Whether the storage of `tensor` is an activation large enough to leave."""
        return (
            type(tensor) is torch.Tensor
            and tensor.layout == torch.strided
            and tensor.device == self._device
            and tensor.untyped_storage().nbytes() >= self._min_bytes
            and _address(tensor) not in self._parameters
        )

    def decline(self, num_bytes: int) -> None:
        self._declined_bytes += num_bytes

    def waiting(self, begin: Any, end: Any) -> None:
        self._waits.append((begin, end))

    def _before(self, _: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if self._active is not None:
            self._active.share([*arguments[1:], *keywords.values()])

    def _after(self, *_: Any) -> None:
        if self._active is not None:
            self._active.layer_done()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass(eq=False)
class _Entry:
    """A storage that leaves. `storage` is None while it is away; the tensors saved from it hold the entry."""

    stash: Stash
    storage: torch.UntypedStorage | None
    num_bytes: int

    def __post_init__(self) -> None:
        weakref.finalize(self, self.stash.discard).atexit = False

    def drop(self) -> bool:
        """Drop the storage; False when its bytes did not get out."""
        gone = self.stash.settle()
        if gone:
            self.storage = None
        return gone

    def recall(self) -> None:
        if self.storage is None:
            self.stash.recall()

    def fetch(self) -> torch.UntypedStorage:
        if self.storage is None:
            self.storage = self.stash.take().untyped_storage()
        return self.storage


@dataclass(frozen=True)
class _Saved:
    """What autograd keeps in place of a tensor: the tensor itself, or the entry and how the tensor views it."""

    micro_batch: "_MicroBatch"
    layer: int
    tensor: Tensor | None = None
    entry: _Entry | None = None
    dtype: torch.dtype = torch.float32
    offset: int = 0
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()


class _MicroBatch:
    """Forward and backward of one micro-batch. Layers count from 0; `layer` is the one that runs."""

    def __init__(self, offloader: Offloader, tier: Tier, leaving: LeavingRows, num_layers: int) -> None:
        self._offloader, self._tier, self._leaving = offloader, tier, leaving
        self._num_layers, self._first_resident = num_layers, num_layers - NUM_RESIDENT_LAYERS
        self.layer = 0
        self._shared: set[int] = set()
        self._known: dict[tuple[int, int], tuple[StorageWeakRef, weakref.ref[_Entry]]] = {}
        self._to_drop: list[list[weakref.ref[_Entry]]] = [[] for _ in range(num_layers + 1)]
        self._saved_in: list[list[weakref.ref[_Entry]]] = [[] for _ in range(num_layers + 1)]
        self._recalled = num_layers

    def share(self, values: Sequence[Any]) -> None:
        """Note what all layers are given: it is used again, so it must stay."""
        for value in values:
            if isinstance(value, Tensor):
                self._shared.add(_address(value))
            elif isinstance(value, tuple | list):
                self.share(value)

    def layer_done(self) -> None:
        """A layer has ended, in which time what the one before it saved could leave."""
        self.layer += 1
        self._drop(self.layer - 2)

    def end_forward(self) -> None:
        for layer in range(self.layer + 1):
            self._drop(layer)
        self._known.clear()
        self._shared.clear()

    def _drop(self, layer: int) -> None:
        if layer < 0 or not self._to_drop[layer]:
            return
        begin = self._tier.clock.mark()
        for reference in self._to_drop[layer]:
            entry = reference()
            if entry is not None and not entry.drop():
                self._offloader.decline(entry.num_bytes)
        self._to_drop[layer].clear()
        self._offloader.waiting(begin, self._tier.clock.mark())

    def pack(self, tensor: Tensor) -> _Saved:
        layer = min(self.layer, self._num_layers)
        entry = None
        if layer < self._first_resident and self._offloader.may_move(tensor) and _address(tensor) not in self._shared:
            entry = self._entry_of(tensor, layer)
        if entry is None:
            # Detached: an output that is kept as it is would keep the graph that keeps it.
            return _Saved(self, layer, tensor=tensor.detach())
        self._saved_in[layer].append(weakref.ref(entry))
        return _Saved(
            self,
            layer,
            entry=entry,
            dtype=tensor.dtype,
            offset=int(tensor.storage_offset()),
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    def _entry_of(self, tensor: Tensor, layer: int) -> _Entry | None:
        """The entry of the tensor's storage, as it is at this version; None when it stays."""
        reference = StorageWeakRef(tensor.untyped_storage())
        key = reference.cdata, tensor._version
        known = self._known.get(key)
        # A live weak reference keeps the address from being given to another storage.
        if known is not None and (entry := known[1]()) is not None:
            return entry
        cut = partition(tensor, self._leaving)
        if not cut.leaving_bytes:
            return None
        storage = tensor.untyped_storage()
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        stash = self._tier.store(source, cut)
        if stash is None:
            self._offloader.decline(cut.leaving_bytes)
            return None
        entry = _Entry(stash, storage, cut.leaving_bytes)
        self._known[key] = reference, weakref.ref(entry)
        self._to_drop[layer].append(weakref.ref(entry))
        return entry

    def reach(self, layer: int) -> None:
        """The backward asks for something of `layer`: start the return of the layer before it."""
        while self._recalled > max(0, layer - 1):
            self._recalled -= 1
            for reference in reversed(self._saved_in[self._recalled]):
                entry = reference()
                if entry is not None:
                    entry.recall()
            self._saved_in[self._recalled].clear()

    def fetch(self, entry: _Entry) -> torch.UntypedStorage:
        if entry.storage is not None:
            return entry.storage
        begin = self._tier.clock.mark()
        storage = entry.fetch()
        self._offloader.waiting(begin, self._tier.clock.mark())
        return storage


def _unpack(saved: _Saved) -> Tensor:
    saved.micro_batch.reach(saved.layer)
    if saved.tensor is not None:
        return saved.tensor
    assert saved.entry is not None
    storage = saved.micro_batch.fetch(saved.entry)
    restored = torch.empty(0, dtype=saved.dtype, device=storage.device)
    return restored.set_(storage, saved.offset, saved.shape, saved.stride)
