"""Offloading on a GPU: layer time, copy bandwidth, and a step of 64K tokens at ratios 0, 0.5 and 1. Under 8 minutes.

    PYTHONPATH=src python -m benchmarks.offload_gpu [--length 65536] [--steps 3] [--layers N]

Layers of LLaMA-7B's sizes in bf16, as many as the device holds without offloading. Expected where copies hide behind
compute: a ratio of 0.5 costs at most 2 % of step time and saves at least 30 % of activation memory. The first step of
every ratio pins host memory and is not counted. One more step with deterministic kernels, not timed, compares the
gradients of every ratio with those without, bit for bit. Has not been run yet: it was written without a GPU at hand.
"""

import argparse
import gc
import time
from typing import Any

import torch

from benchmarks.common import report
from bytescale.config.schema import ModelConfig
from bytescale.profiler.measure import Clock, measure_copies, measure_layer, two_layers
from bytescale.runtime.attention.context import AttentionContext
from bytescale.runtime.attention.interface import AttentionKernel
from bytescale.runtime.attention.kernels import select_kernel
from bytescale.runtime.attention.work import local_work
from bytescale.runtime.model.decoder import LossModel, build_decoder
from bytescale.runtime.model.hf_config import load_model_config, shape_of_config
from bytescale.runtime.offload.offloader import Offloader
from bytescale.runtime.offload.pinned import PinnedTier
from bytescale.runtime.p2p import PeerToPeer

GIB = 1 << 30
SIZES = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 8}
HOST_LIMIT_BYTES = 96 * GIB


def model_config(num_layers: int, length: int) -> Any:
    table = {"model_type": "llama", "vocab_size": 32000, "num_hidden_layers": num_layers, **SIZES}
    return load_model_config(ModelConfig(config=table), length)


def fitting_layers(length: int, device: torch.device) -> int:
    """Layers whose activations, weights and gradients fit in four fifths of the free memory, at most 16."""
    shape = shape_of_config(model_config(1, length), 2)
    free, _ = torch.cuda.mem_get_info(device)
    layer_parameters = shape.attention_parameters + 3 * shape.hidden_size * shape.ffn_size
    # Norm inputs are kept in fp32 as well: a tenth on top of the estimate.
    per_layer = 1.1 * shape.activation_bytes_per_token * length + 4 * layer_parameters
    rest = 8 * shape.hidden_size * shape.vocab_size + 8 * shape.ffn_size * length
    return max(4, min(16, int((0.8 * free - rest) / per_layer)))


def steps_at(
    ratio: float, model: LossModel, kernel: AttentionKernel, length: int, num_steps: int, device: torch.device
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Best of `num_steps` at one ratio after a warm-up, and the gradients of a deterministic step, on the host."""
    context = AttentionContext(local_work([length]), kernel, PeerToPeer(None, 1.0, device))
    tokens_T = torch.arange(length, device=device) % 32000
    positions_T = torch.arange(length, device=device)
    offloader = Offloader(model, lambda: PinnedTier(device, HOST_LIMIT_BYTES), 1 << 20)
    rows = []
    for number in range(num_steps + 2):
        # Flash attention adds up dq in any order unless asked not to.
        torch.use_deterministic_algorithms(number == num_steps + 1, warn_only=True)
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        base = torch.cuda.memory_allocated(device)
        offloader.begin_step()
        begin_s = time.perf_counter()
        with offloader.micro_batch([length], [ratio]):
            loss = model(tokens_T, tokens_T, positions_T, context)
        loss.backward()
        torch.cuda.synchronize(device)
        wall_s = time.perf_counter() - begin_s
        moved = offloader.report()
        rows.append(
            {
                "ratio": ratio,
                "step_s": wall_s,
                "peak_gib": (torch.cuda.max_memory_allocated(device) - base) / GIB,
                "out_gib": moved.bytes_out / GIB,
                "in_gib": moved.bytes_in / GIB,
                "exposed_s": moved.exposed_s,
                "declined_gib": moved.declined_bytes / GIB,
            }
        )
        del loss
    gradients = [p.grad.to("cpu") for p in model.parameters() if p.grad is not None]
    offloader.close()
    gc.collect()
    torch.cuda.empty_cache()
    torch.use_deterministic_algorithms(False)
    return min(rows[1:-1], key=lambda row: row["step_s"]), gradients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=65536)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, help="default: as many as fit")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    print(torch.cuda.get_device_name(device))
    kernel, clock = select_kernel(device), Clock(device)
    layer = measure_layer(
        two_layers(model_config(2, asked.length), device, torch.bfloat16), kernel, [asked.length], clock, 3
    )
    report("One layer", [{name: values[0] for name, values in layer.items()}])
    tier = PinnedTier(device, 8 * GIB)
    report("Copies, GB/s", [{name: rates[0] / 1e9 for name, rates in measure_copies(tier, device).items()}])
    tier.close()
    torch.cuda.empty_cache()
    num_layers = asked.layers or fitting_layers(asked.length, device)
    decoder = build_decoder(ModelConfig(config={"model_type": "llama"}), model_config(num_layers, asked.length), 0)
    model = LossModel(decoder.to(device=device, dtype=torch.bfloat16).train())
    rows: list[dict[str, Any]] = []
    expected: list[torch.Tensor] = []
    for ratio in (0.0, 0.5, 1.0):
        row, gradients = steps_at(ratio, model, kernel, asked.length, asked.steps, device)
        expected = expected or gradients
        plain = rows[0] if rows else row
        row["slower_percent"] = 100 * (row["step_s"] / plain["step_s"] - 1)
        row["saved_percent"] = 100 * (1 - row["peak_gib"] / plain["peak_gib"])
        row["gradients_equal"] = all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
        rows.append(row)
    report(f"Steps of {asked.length} tokens, {num_layers} layers, bf16", rows)


if __name__ == "__main__":
    main()
