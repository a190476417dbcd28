"""Tokens per second of the trainer: beside a plain Transformers loop on one rank; `hdp-naive` and `static` on two.

python -m benchmarks.trainer             about three minutes on two cores
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from benchmarks.common import on_ranks, report, timed
from bytescale.config.data import DataConfig
from bytescale.config.schema import BatchConfig, Config, ModelConfig, ParallelConfig, PlanConfig
from bytescale.data import LoaderState, StepData, next_batch, read_micro_batch
from bytescale.plan.share import rank_share
from bytescale.runtime.attention.kernels import CpuKernel
from bytescale.runtime.fsdp import shard_model
from bytescale.runtime.world import join_groups
from bytescale.train.prepare import Prepared, make_planner, prepare
from bytescale.train.step import run_step
from bytescale.train.trainer import build_model

CONFIG = Config(
    model=ModelConfig(
        config={
            "model_type": "llama",
            "vocab_size": 8192,
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
    ),
    data=DataConfig(source="python-stdlib", max_context=4096),
    batch=BatchConfig(tokens=8192),
    plan=PlanConfig(strategy="hdp-naive", tokens_per_rank=4096),
)


def _batches(prepared: Prepared, planner: Any, rank: int, number: int) -> list[StepData]:
    steps, state = [], LoaderState()
    for step in range(1, number + 1):
        batch, state = next_batch(prepared.dataset, CONFIG.batch, 0, state)
        plan = planner(batch.lengths)
        own = tuple(read_micro_batch(prepared.dataset, batch, plan, rows) for rows in plan.micro_batch_rows(rank))
        steps.append(StepData(step, batch, rank_share(plan, rank), own, 0.0, 0.0, state))
    return steps


def _against_plain(rank: int, size: int, number: int) -> list[dict[str, float]]:
    """Forward, backward and reduction of the same packs: ours, and Transformers with torch's attention."""
    prepared = prepare(CONFIG, 1)
    model, world = build_model(CONFIG, prepared), join_groups(rank, size, ParallelConfig(), torch.device("cpu"), 600.0)
    shard_model(model, world, torch.float32)
    plain = AutoModelForCausalLM.from_config(prepared.model_config, attn_implementation="sdpa").train()
    steps = _batches(prepared, prepared.planner, rank, number)

    def ours(data: StepData) -> None:
        run_step(model, CpuKernel(), world, data)
        model.zero_grad()

    times: dict[str, list[float]] = {"ours": [], "one call a pack": [], "one call a sequence": []}
    for repeat, data in enumerate([steps[0], *steps]):
        for name, call in (
            ("ours", lambda data=data: ours(data)),
            ("one call a pack", lambda data=data: _plain(plain, data, whole_packs=True)),
            ("one call a sequence", lambda data=data: _plain(plain, data, whole_packs=False)),
        ):
            seconds = timed(call)
            if repeat:
                times[name].append(seconds)
    tokens = [data.batch.num_tokens for data in steps]
    return [
        {
            "loop": name,
            "tokens_per_s": sum(tokens) / sum(seconds),
            "ours_relative_median": statistics.median(a / b for a, b in zip(seconds, times["ours"], strict=True)),
        }
        for name, seconds in times.items()
    ]


def _plain(model: Any, data: StepData, *, whole_packs: bool) -> None:
    """A plain loop: mean over targets, gradients added up, plain head and cross-entropy."""
    for micro_batch in data.micro_batches:
        columns = [torch.from_numpy(c) for c in (micro_batch.input_ids, micro_batch.labels, micro_batch.position_ids)]
        starts = np.flatnonzero(micro_batch.position_ids == 0).tolist()
        cuts = [0] if whole_packs else starts
        for begin, end in zip(cuts, [*cuts[1:], len(columns[0])], strict=True):
            input_ids, labels, position_ids = (c[begin:end] for c in columns)
            logits = model(input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False).logits[0]
            loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            (loss / data.batch.total_targets).backward()
    model.zero_grad()


def _strategies(rank: int, size: int, number: int) -> list[dict[str, float]]:
    """The same batches under two strategies, step by step in turn."""
    config = replace(CONFIG, plan=PlanConfig(tokens_per_rank=2048), batch=BatchConfig(tokens=16384))
    prepared = prepare(config, size)
    model, world = build_model(config, prepared), join_groups(rank, size, ParallelConfig(), torch.device("cpu"), 600.0)
    shard_model(model, world, torch.float32)
    planners: dict[str, Callable[..., Any]] = {
        name: make_planner(config, prepared.shape, size, name) for name in ("static", "hdp-naive")
    }
    steps = {name: _batches(prepared, planner, rank, number) for name, planner in planners.items()}
    seconds: dict[str, list[float]] = {name: [] for name in planners}
    sent = dict.fromkeys(planners, 0)
    for index in [0, *range(number)]:
        for name in planners:
            dist.barrier()
            begin_s = time.perf_counter()
            result = run_step(model, CpuKernel(), world, steps[name][index])
            model.zero_grad()
            dist.barrier()
            seconds[name].append(time.perf_counter() - begin_s)
            sent[name] += result.bytes_sent
    tokens = sum(data.batch.num_tokens for data in steps["static"])
    return [
        {
            "strategy": name,
            "tokens_per_s": tokens / sum(seconds[name][1:]),
            "relative_median": statistics.median(
                a / b for a, b in zip(seconds["static"][1:], seconds[name][1:], strict=True)
            ),
            "MiB_sent_by_rank_0": sent[name] / 2**20,
        }
        for name in planners
    ]


def main() -> None:
    """Print both tables."""
    report("One rank, one thread, the same packs", on_ranks(1, _against_plain, 6))
    report("Two ranks, one thread each, the same batches and kernels", on_ranks(2, _strategies, 3))


if __name__ == "__main__":
    main()
