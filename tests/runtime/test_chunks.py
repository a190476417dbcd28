"""Sequences in chunks: loss and gradients are those of whole sequences on one process, whatever the plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

from bytescale.cost import preset_cost
from bytescale.plan.step_plan import StepPlan
from bytescale.plan.validate import validate
from bytescale.runtime.attention.kept_kv import KeptKv
from bytescale.runtime.attention.kernels import CpuKernel
from bytescale.runtime.attention.work import KeptRows, attention_work
from bytescale.runtime.fsdp import full_gradients, shard_model
from bytescale.runtime.model.stages import layer_ranges, stage_model
from bytescale.runtime.offload.disk import DiskTier
from bytescale.runtime.offload.offloader import Offloader
from bytescale.simulator import simulate, step_spans
from bytescale.train.step import run_step
from tests.plans import chunked_plans, drawn_in_chunks, in_chunks
from tests.ranks import RankPool, Ranks
from tests.runtime.models import small_decoder, step_data, train_step, world_of
from tests.runtime.test_pipeline import check

# A sequence in three chunks over both pipelines, one in two chunks on one pipeline, whole ones, 5 and 4 micro-batches.
TWO = drawn_in_chunks(
    "90 41 30 17",
    "0@0:35[0/2] | 0@35:70[0/2] | 0@70:90[0/2] | 1@0:20 | 1@20:41",
    "0@0:35[1/2] | 0@35:70[1/2] | 0@70:90[1/2] | 2@0:30 3@0:17",
)
# Three pipelines: uneven chunks on all of them, one packed beside a whole sequence; two units of chunks on one.
THREE = drawn_in_chunks(
    "80 25 33 12",
    "0@0:3[1/3] | 0@3:60[1/3] 1@0:25 | 0@60:80[1/3]",
    "0@0:3[2/3] | 0@3:60[2/3] | 0@60:80[2/3] | 2@0:11 | 2@11:33",
    "0@0:3[0/3] | 0@3:60[0/3] | 0@60:80[0/3] | 3@0:12",
)
ALONE = drawn_in_chunks("60 20", "0@0:10 | 0@10:30 | 0@30:60 | 1@0:20")


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(TWO, id="2x2", marks=pytest.mark.long),
        pytest.param(THREE, id="2x3", marks=pytest.mark.long),
        pytest.param(ALONE, id="2x1"),
    ],
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_whole_sequences(ranks: RankPool, plan: StepPlan, checkpointing: bool) -> None:
    validate(plan)
    check(ranks, plan, "llama", 1e-12, checkpointing=checkpointing, num_hidden_layers=5)
    check(ranks, plan, "llama", 1e-5, checkpointing=checkpointing)


def test_three_stages_and_tied_embeddings(ranks: RankPool) -> None:
    three = drawn_in_chunks("60 31", "0@0:20[0/2] | 0@20:60[0/2] | 1@0:31", "0@0:20[1/2] | 0@20:60[1/2]", pp_size=3)
    check(ranks, three, "llama", 1e-12, num_hidden_layers=4, tie_word_embeddings=True)


def _loss(ranks: Ranks, plan: StepPlan) -> float:
    return train_step(ranks, plan)[0]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("hdp_size", [2, 3])
@pytest.mark.long
def test_random_chunked_plans_end_with_the_loss_of_one_process(ranks: RankPool, hdp_size: int) -> None:
    @settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(plan=chunked_plans(hdp_size, 2))
    def agree(plan: StepPlan) -> None:
        assume(int(plan.lengths.max()) > 1)
        validate(plan)
        whole = [[(length, [(0, i)])] for i, length in enumerate(plan.lengths.tolist())]
        alone = in_chunks(plan.lengths.tolist(), whole, 1, pp_size=2)
        loss = ranks.run(2, _loss, alone, timeout_s=30)[0]
        found = ranks.run(2 * hdp_size, _loss, plan, timeout_s=30)
        assert found == pytest.approx([loss] * 2 * hdp_size, rel=1e-5)

    agree()


def _operations(ranks: Ranks, plan: StepPlan) -> list[str]:
    result = train_step(ranks, plan)[2]
    return [span.name for span in result.spans if span.category in ("forward", "backward")]


def test_operations_are_those_of_the_simulator(ranks: RankPool) -> None:
    recorded = ranks.run(6, _operations, THREE)
    spans = step_spans(simulate(THREE, preset_cost("llama-7b", "h100")), range(3))
    for rank in range(3):
        for stage in range(2):
            own = [s for s in spans if (s.rank, s.track) == (rank, f"stage {stage}")]
            names = [s.name for s in sorted(own, key=lambda s: s.start_s) if s.category in ("forward", "backward")]
            assert recorded[stage * 3 + rank] == names


def _offloaded(ranks: Ranks, directory: str) -> tuple[list[str], int]:
    """Gradients that differ from those without offloading, and bytes moved."""
    decoder = small_decoder("llama", num_hidden_layers=8).train()
    world = world_of(ranks, pp_size=2)
    model = stage_model(decoder, layer_ranges([4, 4]), world.stage)
    shard_model(model, world, torch.float32)
    leaving = replace(TWO, pieces=replace(TWO.pieces, offload_ratio=np.full(len(TWO.pieces), 1.0)))
    offloader = Offloader(model, lambda: DiskTier(Path(directory), 1 << 30), 512)
    results = []
    for plan, mover in ((TWO, None), (leaving, offloader)):
        report = run_step(model, CpuKernel(), world, step_data(plan, world.hdp_rank), mover).offload
        results.append({name: g.clone() for name, g in full_gradients(model).items()})
        model.zero_grad()
    offloader.close()
    plain, moved = results
    return [name for name in plain if not torch.equal(plain[name], moved[name])], report.bytes_out


def test_offloading_changes_no_bit(ranks: RankPool, tmp_path: Path) -> None:
    for differing, num_bytes in ranks.run(4, _offloaded, str(tmp_path)):
        assert not differing
        assert num_bytes > 0


def test_every_key_is_seen_once_by_every_later_query() -> None:
    """Pairs (query, key) of all blocks of all ranks together are the causal triangle, by counting."""
    plan = THREE
    pairs = 0
    for rank in range(3):
        for work in attention_work(plan, rank):
            pairs += sum((b.q_end - b.q_begin) * (b.q_end - b.q_begin + 1) // 2 for b in work.local)
            blocks: list[Any] = [*work.kept_blocks, *(b for step in work.steps for b in step.blocks)]
            pairs += sum((b.q_end - b.q_begin) * (b.kv_end - b.kv_begin) for b in blocks)
    assert pairs == sum(n * (n + 1) // 2 for n in plan.lengths.tolist())


def test_gradients_reach_the_chunk_that_made_the_keys_and_nothing_is_left() -> None:
    kept = KeptKv()
    chunks = [torch.arange(float(n)).reshape(n, 1, 1) for n in (2, 3)]
    for number, rows in enumerate(chunks):
        own = KeptRows(7, number, 0, len(rows))
        for _ in range(2):  # recomputation puts it again
            kept.put(0, own, rows, rows + 10)
    third = KeptRows(7, 2, 4, 9)
    keys, values = kept.earlier(0, third)
    assert torch.cat(keys).flatten().tolist() == [0, 1, 0, 1, 2]
    assert torch.cat(values).flatten().tolist() == [10, 11, 10, 11, 12]
    gradient = torch.arange(9.0).reshape(9, 1, 1)
    kept.add_gradients(0, third, gradient, -gradient)
    later = kept.take_gradients(0, KeptRows(7, 1, 0, 3))
    assert later is not None and later[0].flatten().tolist() == [6, 7, 8]
    kept.add_gradients(0, KeptRows(7, 1, 3, 5), gradient, gradient)
    first = kept.take_gradients(0, KeptRows(7, 0, 0, 2))
    assert first is not None
    assert first[0].flatten().tolist() == [4 + 3, 5 + 4]
    assert first[1].flatten().tolist() == [-4 + 3, -5 + 4]
    assert len(kept) == 0


def test_chunks_without_a_token_somewhere_are_refused() -> None:
    plan = drawn_in_chunks("20", "0@0:1[0/2] | 0@1:20[0/2]", "0@0:1[1/2] | 0@1:20[1/2]")
    with pytest.raises(ValueError, match="a chunk of it has no token on rank"):
        validate(plan)
