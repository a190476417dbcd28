"""Runs a built model as TP ranks would, in threads of this process, and refuses it where the result is another one.

A plan of Transformers says how weights are split, not what else the code of a layer does with its heads and hidden
units. Eight tokens through the split model must give the hidden states and the loss of the whole one. The collectives
are exact transposes, so where the result is the same for any weights, so are the gradients.

Cost: one more forward pass of eight tokens; the threads share the weights of the model.
"""

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bytescale.data.reader import IGNORED_LABEL
from bytescale.errors import UserError
from bytescale.runtime.model.checks import complaint
from bytescale.runtime.model.decoder import LossModel
from bytescale.runtime.model.probe import close, packed_sequences
from bytescale.runtime.tensor_parallel.group import TensorGroup
from bytescale.runtime.tensor_parallel.layers import split_model

TOLERANCE = 1e-4
"""Relative difference in fp32: the ranks add up the same numbers in another order."""


def probe_split(decoder: Any, max_context: int, tp_size: int) -> None:
    """Compare `decoder` with what `tp_size` ranks make of it.

    Args:
        decoder: the fp32 model on the CPU, registered attention active; it stays as it is.
        max_context: longest sequence that is to come.
        tp_size: TP ranks; 1 is nothing to compare.

    Raises:
        UserError: the ranks would compute something else, or nothing.
    """
    if tp_size == 1:
        return
    name, alone = f"model {decoder.config.model_type!r} cannot be shared by TP ranks", "set parallel.tp_size = 1"
    ids_T, position_ids_T, _ = packed_sequences(decoder, max_context)
    labels_T = torch.cat([ids_T[1:], torch.tensor([IGNORED_LABEL])])

    def run(model: LossModel) -> tuple[Tensor, Tensor]:
        # A context each: its kernel belongs to the thread.
        context = packed_sequences(decoder, max_context)[2]
        with torch.no_grad():
            hidden_RE = model.hidden_states(ids_T, position_ids_T, context)
            return hidden_RE, model(ids_T, labels_T, position_ids_T, context)

    def run_rank(tp: TensorGroup) -> tuple[Tensor, Tensor]:
        model = LossModel(_twin(decoder))
        split_model(model, None, tp)
        return run(model)

    whole_TE, whole_loss = run(LossModel(decoder))
    try:
        parts = _in_threads(tp_size, run_rank)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    except Exception as error:
        raise UserError(f"{name}: their parts do not run ({complaint(error)}); {alone}") from error
    hidden_TE = torch.cat([hidden_RE for hidden_RE, _ in parts])[: len(ids_T)]
    same = close(hidden_TE, whole_TE, TOLERANCE) and all(close(loss, whole_loss, TOLERANCE) for _, loss in parts)
    if not same:
        raise UserError(f"{name}: together they give another result than the whole model; {alone}")


def _twin(decoder: Any) -> Any:
    """Modules of its own, which hold the same weights."""
    tensors = [*decoder.parameters(), *decoder.buffers()]
    return copy.deepcopy(decoder, {id(tensor): tensor for tensor in tensors})


class _Threads:
    """What the threads of a group have put down for each other."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.table: list[Any] = [None] * size

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks."""
        self.table[rank] = tensor
        self.barrier.wait()
        everyone = list(self.table)
        self.barrier.wait()
        return everyone


class _ThreadGroup(TensorGroup):
    """One of several threads that stand for the TP ranks."""

    def __init__(self, rank: int, threads: _Threads) -> None:
        self.rank, self.size = rank, len(threads.table)
        self._threads = threads

    def gather(self, x_RX: Tensor) -> Tensor:
        return torch.cat(self._threads.exchange(self.rank, x_RX))

    def sum_rows(self, x_TX: Tensor) -> Tensor:
        return sum(x.chunk(self.size)[self.rank] for x in self._threads.exchange(self.rank, x_TX))  # type: ignore[return-value]


def _in_threads(size: int, function: Callable[[TensorGroup], Any]) -> list[Any]:
    """What `function` returns on each rank; the first error of any."""
    shared = _Threads(size)
    results: list[Any] = [None] * size
    errors: list[Exception] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(_ThreadGroup(rank, shared))
        except threading.BrokenBarrierError:
            pass  # another one has failed
        except Exception as error:
            errors.append(error)
            shared.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
