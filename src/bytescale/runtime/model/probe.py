"""Runs a built model on eight tokens before anything is trained, and refuses what would be ignored or come out wrong.

Lists of names (`checks`) know some features; the built model knows all of them. Compared, in training mode:

- our attention and head on two sequences in one pack with Hugging Face's eager attention and head on each alone: finds
  other attention, tokens mixed outside attention, positions that are not those given, parameters left out;
- the same forward with every random number as small and as large as it gets: a difference is dropout, routing noise or
  a skipped layer, whatever its probability and name;
- the pipeline stages one after the other with the whole model, to rounding: finds what a base model does around its
  layers;
- how often each layer runs, which sharding, recomputation and stages take to be once.

Cost: two forward passes of eight tokens, one more with stages, two more where random numbers are drawn.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bytescale.errors import UserError
from bytescale.runtime.attention.context import AttentionContext
from bytescale.runtime.attention.cpu_kernel import CpuKernel
from bytescale.runtime.attention.work import local_work
from bytescale.runtime.model.checks import complaint
from bytescale.runtime.model.decoder import LossModel
from bytescale.runtime.model.parts import decoder_layers
from bytescale.runtime.model.stages import stage_model
from bytescale.runtime.p2p import PeerToPeer

Tensor = torch.Tensor

TOLERANCE = 1e-3
"""Relative difference in fp32 above which eager and our attention do not compute the same."""

STAGE_TOLERANCE = 1e-5
"""The same for stages, which do what the whole model does with the same kernels."""


def probe(decoder: Any, max_context: int, stages: Sequence[range] = ()) -> None:
    """Compare the built model with what Hugging Face computes for it, and its stages with the whole.

    Args:
        decoder: the fp32 model on the CPU, registered attention active, before sharding.
        max_context: longest sequence that is to come.
        stages: layers of each pipeline stage.

    Raises:
        UserError: the configuration does not work, or the model does something that would be ignored or go wrong.
    """
    name = f"model {decoder.config.model_type!r}"
    lengths = _lengths(max_context)
    input_ids_T = torch.arange(sum(lengths)) % decoder.config.vocab_size
    was_training = decoder.training
    decoder.train()
    try:
        with torch.random.fork_rng(devices=[]):
            # Their code on its own comes first: what fails there is the configuration's fault, not ours.
            hidden_TE, logits_TV = _hugging_face(decoder, name, input_ids_T, lengths)
        decoder.set_attn_implementation("bytescale")
        packed_TE = _packed(decoder, name, input_ids_T, lengths, max_context)
        _check_result(decoder, name, packed_TE, hidden_TE, logits_TV)
        if len(stages) > 1:
            _check_stages(decoder, name, input_ids_T, lengths, max_context, stages, packed_TE)
    finally:
        decoder.set_attn_implementation("bytescale")
        decoder.train(was_training)


def _hugging_face(decoder: Any, name: str, input_ids_T: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """(hidden_TE, logits_TV) of the sequences, each alone, through eager attention and their head."""
    decoder.set_attn_implementation("eager")

    def run() -> tuple[Tensor, Tensor]:
        outputs = [
            decoder(input_ids=ids_T[None], use_cache=False, output_hidden_states=True)
            for ids_T in input_ids_T.split(lengths)
        ]
        return torch.cat([o.hidden_states[-1][0] for o in outputs]), torch.cat([o.logits[0] for o in outputs])

    state = torch.get_rng_state()
    try:
        found = run()
    except Exception as error:
        raise UserError(f"{name} does not run as configured: {complaint(error)}") from None
    if not torch.equal(state, torch.get_rng_state()):
        try:
            with torch.no_grad(), _Draws(0.0):
                low = run()
            with torch.no_grad(), _Draws(1.0):
                high = run()
            same = torch.equal(low[1], high[1])
        except Exception:
            same = False
        if not same:
            raise UserError(
                f"{name} draws random numbers in training{_sources(decoder)}, which is not supported yet; every rank "
                "would draw the same ones"
            )
    return found


def _sources(decoder: Any) -> str:
    dropouts = [key for key, module in decoder.named_modules() if isinstance(module, nn.Dropout) and module.p > 0]
    return f" ({', '.join(dropouts[:2])}{' and more' if len(dropouts) > 2 else ''})" if dropouts else ""


class _Draws(TorchDispatchMode):
    """Every random number drawn inside is `value`."""

    def __init__(self, value: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.value = value

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        # Attention kernels carry the tag for a dropout of their own, which eager attention does outside of them.
        if torch.Tag.nondeterministic_seeded in function.tags and "attention" not in str(function):
            for tensor in tree_leaves(result):
                tensor.fill_(self.value)
        return result


def packed_sequences(decoder: Any, max_context: int) -> tuple[Tensor, Tensor, AttentionContext]:
    """(input_ids_T, position_ids_T, context) of two sequences in one pack."""
    lengths = _lengths(max_context)
    return torch.arange(sum(lengths)) % decoder.config.vocab_size, *_context(lengths, max_context)


def _lengths(max_context: int) -> list[int]:
    return [min(5, max_context), min(3, max_context)]


def _context(lengths: list[int], max_context: int) -> tuple[Tensor, AttentionContext]:
    """(position_ids_T, context) of the sequences in one pack."""
    comm = PeerToPeer(None, 1.0, torch.device("cpu"))
    context = AttentionContext(local_work(lengths), CpuKernel(), comm, max_context)
    return torch.cat([torch.arange(length) for length in lengths]), context


def _packed(decoder: Any, name: str, input_ids_T: Tensor, lengths: list[int], max_context: int) -> Tensor:
    """hidden_TE of the sequences in one pack, through our attention."""
    position_ids_T, context = _context(lengths, max_context)
    model = LossModel(decoder)
    with _calls(decoder_layers(decoder)) as calls:
        try:
            hidden_TE = model.hidden_states(input_ids_T, position_ids_T, context)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
        except Exception as error:
            raise UserError(f"{name} does not run on packed sequences: {complaint(error)}") from error
    if odd := sorted(number for number in range(len(decoder_layers(decoder))) if calls[number] != 1):
        raise UserError(
            f"{name} runs its layer {odd[0]} {calls[odd[0]]} times in one forward; every layer must run exactly once"
        )
    return hidden_TE


@contextmanager
def _calls(layers: nn.ModuleList) -> Any:
    """How often each layer runs inside the block, by number."""
    calls: Counter[int] = Counter()

    def count(number: int) -> Any:
        return lambda *_: calls.update([number])

    hooks = [layer.register_forward_pre_hook(count(number)) for number, layer in enumerate(layers)]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _check_result(decoder: Any, name: str, packed_TE: Tensor, hidden_TE: Tensor, logits_TV: Tensor) -> None:
    head = decoder.get_output_embeddings().weight
    if not close(packed_TE, hidden_TE, TOLERANCE):
        raise UserError(
            f"{name} does something that is not supported yet: its layers give another result than with eager "
            "attention on each sequence alone"
        )
    linear_TV = torch.nn.functional.linear(hidden_TE, head)
    if linear_TV.shape != logits_TV.shape or not close(linear_TV, logits_TV, TOLERANCE):
        raise UserError(
            f"{name} does something in its head beyond a linear layer (bias, scaling or softcapping), which is not "
            "supported yet"
        )
    names = {id(parameter): key for key, parameter in decoder.named_parameters()}
    ignored = _leaves(logits_TV) - _leaves(packed_TE) - {id(head)}
    if left_out := sorted(names[leaf] for leaf in ignored if leaf in names):
        raise UserError(f"{name} has a parameter that our attention or head would leave out ({left_out[0]})")


def _check_stages(
    decoder: Any,
    name: str,
    input_ids_T: Tensor,
    lengths: list[int],
    max_context: int,
    stages: Sequence[range],
    whole_TE: Tensor,
) -> None:
    position_ids_T, context = _context(lengths, max_context)
    travelling = input_ids_T
    for number in range(len(stages)):
        model = stage_model(decoder, stages, number)
        try:
            with torch.no_grad():
                travelling = model.hidden_states(travelling, position_ids_T, context)
        except Exception as error:
            raise UserError(
                f"{name} cannot be cut into pipeline stages: stage {number} does not run by itself "
                f"({complaint(error)}); set parallel.pp_size = 1"
            ) from error
    if not close(travelling, whole_TE, STAGE_TOLERANCE):
        raise UserError(
            f"{name} cannot be cut into pipeline stages: {len(stages)} stages one after the other give another result "
            "than the whole model; set parallel.pp_size = 1"
        )


def _leaves(result: Tensor) -> set[int]:
    """Identities of the parameters that `result` depends on: a walk of the graph, which costs no gradient."""
    leaves: set[int] = set()
    seen: set[Any] = set()
    waiting = [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        waiting += [following for following, _ in node.next_functions]
    return leaves


def close(left: Tensor, right: Tensor, tolerance: float) -> bool:
    """Whether `left` is `right` up to `tolerance` of its largest entry."""
    scale = right.abs().max().clamp_min(1e-30)
    return bool((left - right).abs().max() <= tolerance * scale)
