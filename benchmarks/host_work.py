"""Host time of a micro-batch against the number of sequences in it: without the attention kernels, and all of it.

python -m benchmarks.host_work           under a minute on two cores

The same tokens are cut into more and more sequences. `host_ms` is CPU time of a layer call, forward and backward,
with a kernel that computes nothing, so that only what the program does around the kernels is left; `whole_ms` is that
of a layer call with the CPU kernel. `prepare_ms` is spent once a micro-batch, before its first layer. The model is
small on purpose: its linear layers should hide nothing.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import report
from bytescale.config.schema import ModelConfig
from bytescale.runtime.attention.context import AttentionContext
from bytescale.runtime.attention.interface import AttentionKernel, Call, QuerySide
from bytescale.runtime.attention.kernels import CpuKernel
from bytescale.runtime.attention.work import local_work
from bytescale.runtime.fsdp import gather, reduce, shard_model
from bytescale.runtime.model.decoder import LossModel, build_decoder
from bytescale.runtime.model.hf_config import load_model_config
from bytescale.runtime.presence import presence
from bytescale.runtime.world import World, open_world

NUM_TOKENS, NUM_LAYERS = 4200, 8
NUM_SEQUENCES = (10, 30, 100, 300, 700, 1000)
MODEL = ModelConfig(
    config={
        "model_type": "llama",
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
)


class NoKernel(CpuKernel):
    """Results of the right shape, nothing computed."""

    def forward(self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, call: Call, scale: float) -> tuple[Tensor, Tensor]:
        rows = call.q.num_rows
        return q_THD.new_empty((rows, *q_THD.shape[1:])), q_THD.new_empty((rows, q_THD.shape[1]), dtype=torch.float32)

    def backward(
        self, queries: QuerySide, k_SGD: Tensor, v_SGD: Tensor, call: Call, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq_PHD = queries.q_THD.new_empty((call.q.num_rows, *queries.q_THD.shape[1:]))
        dk_PGD, dv_PGD = (x.new_empty((call.kv.num_rows, *x.shape[1:])) for x in (k_SGD, v_SGD))
        return dq_PHD, dk_PGD, dv_PGD


def cpu_ms(function: Callable[[], Any], repeats: int = 7) -> float:
    """Least CPU time of a call."""
    best = float("inf")
    for _ in range(repeats):
        begin = time.process_time()
        function()
        best = min(best, time.process_time() - begin)
    return best * 1e3


def lengths_of(num_sequences: int, *, mixed: bool) -> list[int]:
    """So many lengths of `NUM_TOKENS` together: nearly equal, or from 1 to about twice the mean."""
    weights = torch.linspace(0.05, 2.0, num_sequences) if mixed else torch.ones(num_sequences)
    ends = (weights.cumsum(0) / weights.sum() * (NUM_TOKENS - num_sequences)).round().long()
    return [int(n) + 1 for n in torch.diff(ends, prepend=torch.zeros(1, dtype=torch.long))]


def measure(world: World, dtype: torch.dtype, *, mixed: bool) -> list[dict[str, Any]]:
    """One row a number of sequences."""
    model = LossModel(build_decoder(MODEL, load_model_config(MODEL, NUM_TOKENS), 0))
    shard_model(model, world, dtype)
    rows = []
    for num_sequences in NUM_SEQUENCES:
        lengths = lengths_of(num_sequences, mixed=mixed)
        ids_T = torch.arange(NUM_TOKENS) % 128
        position_ids_T = torch.cat([torch.arange(n) for n in lengths])

        def layer_ms(kernel: AttentionKernel) -> float:
            context = AttentionContext(local_work(lengths), kernel, world.comm)  # noqa: B023
            gather(model)
            both = cpu_ms(lambda: model(ids_T, ids_T, position_ids_T, context).backward())  # noqa: B023
            reduce(model, CpuKernel(), world.comm, 1)
            model.zero_grad()
            return both / NUM_LAYERS

        rows.append(
            {
                "sequences": num_sequences,
                "lengths": "mixed" if mixed else "equal",
                "dtype": str(dtype)[6:],
                "host_ms": layer_ms(NoKernel()),
                "whole_ms": layer_ms(CpuKernel()),
                "prepare_ms": cpu_ms(lambda: AttentionContext(local_work(lengths), CpuKernel(), world.comm)),  # noqa: B023
            }
        )
    return rows


def main() -> None:
    """Equal and mixed lengths in bfloat16, whose parameters FSDP2 casts."""
    torch.set_num_threads(1)
    with presence(60.0, None) as here, open_world(here, 60.0) as world:
        rows = [row for mixed in (False, True) for row in measure(world, torch.bfloat16, mixed=mixed)]
    report(f"{NUM_TOKENS} tokens, {NUM_LAYERS} layers, hidden 32, one rank, one thread; CPU time of a layer call", rows)


if __name__ == "__main__":
    main()
