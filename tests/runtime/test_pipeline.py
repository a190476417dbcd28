"""Pipelines with unequal micro-batch counts against one process: loss and every gradient."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

from bytescale.errors import UserError
from bytescale.plan import StepPlan
from bytescale.runtime.attention import AttentionContext
from bytescale.runtime.comm import PeerToPeer
from bytescale.runtime.kernels import CpuKernel
from bytescale.runtime.model import LossModel
from bytescale.runtime.pipeline import StageInput, StagePosition, add_tied_gradients, run_stage
from bytescale.runtime.rings import attention_layouts, local_layout
from bytescale.runtime.stages import cut_to_stage, split_layers
from bytescale.runtime.states import full_gradients, gather, reduce, shard_model
from bytescale.validate import PlanError, validate
from tests.plans import placed, valid_plans
from tests.ranks import RankPool, Ranks
from tests.runtime.models import SIZES, in_type, micro_batches, reference_step, small_decoder


def _pipeline_step(
    ranks: Ranks, plan: StepPlan, architecture: str, dtype: torch.dtype, checkpointing: bool, extra: dict[str, Any]
) -> tuple[float, dict[str, torch.Tensor], range]:
    """(loss sum, whole gradients of this stage, its layers)."""
    hdp_size, pp_size = plan.hdp_size, plan.pp_size
    stage, hdp_rank = divmod(ranks.rank, hdp_size)
    cpu = torch.device("cpu")
    mesh, attention = ranks.blocks[hdp_size]
    decoder = in_type(small_decoder(architecture, **extra), dtype)
    layers = split_layers(decoder.config.num_hidden_layers, pp_size)[stage]
    is_first, is_last = stage == 0, stage == pp_size - 1
    cut_to_stage(decoder, layers, is_first=is_first, is_last=is_last)
    if checkpointing:
        decoder.gradient_checkpointing_enable({"use_reentrant": False})
    model = LossModel(decoder, is_first=is_first, is_last=is_last)
    shard_model(model, mesh, cpu, dtype)
    comm = PeerToPeer(attention, 60.0, cpu)
    position = StagePosition(
        stage,
        pp_size,
        previous=ranks.rank - hdp_size,
        following=ranks.rank + hdp_size,
        pipe=PeerToPeer(ranks.group, 60.0, cpu),
        hidden_size=SIZES["hidden_size"],
        dtype=dtype,
    )
    inputs = [
        StageInput(
            *map(torch.from_numpy, (b.input_ids, b.labels, b.position_ids)), AttentionContext(a, CpuKernel(), comm)
        )
        for b, a in zip(micro_batches(plan, hdp_rank, {}), attention_layouts(plan, hdp_rank), strict=True)
    ]
    gather(model)
    loss = run_stage(model, inputs, position, lambda number, direction: None)
    comm.drain()
    reduce(model, AttentionContext(local_layout([1]), CpuKernel(), comm), max(1, int((plan.lengths - 1).sum())))
    if model.is_tied:
        add_tied_gradients(model, position, hdp_rank + (0 if stage else (pp_size - 1) * hdp_size))
    return float(loss), full_gradients(model), layers


def check(
    ranks: RankPool, plan: StepPlan, architecture: str, bound: float, checkpointing: bool = False, **extra: Any
) -> None:
    dtype = torch.float64 if bound < 1e-9 else torch.float32
    exact = architecture == "llama"
    loss, gradients = reference_step(
        plan, architecture=architecture, master=torch.float64 if exact else torch.float32, **extra
    )
    results = ranks.run(plan.hdp_size * plan.pp_size, _pipeline_step, plan, architecture, dtype, checkpointing, extra)
    total = sum(r[0] for r in results) / int((plan.lengths - 1).sum())
    assert abs(total - loss) <= bound * loss
    seen = set()
    for _, found, layers in results:
        for name, gradient in found.items():
            whole = _whole_name(name, layers)
            if extra.get("tie_word_embeddings"):
                whole = whole.replace("lm_head.weight", "model.embed_tokens.weight")
            seen.add(whole)
            error = (gradient.double() - gradients[whole]).abs().max()
            assert error <= bound * gradients[whole].abs().max().clamp_min(1e-12), whole
    assert seen == set(gradients)


def _whole_name(name: str, layers: range) -> str:
    head, found, tail = name.partition(".layers.")
    if not found:
        return name
    index, _, rest = tail.partition(".")
    return f"{head}.layers.{layers[int(index)]}.{rest}"


def in_pipelines(plan_of: Any, pp_size: int) -> StepPlan:
    lengths, placement, hdp_size = plan_of
    return placed(lengths, placement, hdp_size, pp_size=pp_size)


ALONE = ([40, 61, 7], [[(0, 0)], [(0, 1)], [(0, 2)]], 1)
# 3 and 1 micro-batches, a sequence across both pipelines.
SHARED = ([40, 61, 90, 20], [[(0, 0)], [(0, 1), (1, 0)], [(0, 2)], [(0, 2)]], 2)
# 8 and 0 micro-batches: a pipeline without work.
IDLE = ([30 + i for i in range(8)], [[(0, i)] for i in range(8)], 2)
# 1, 2 and 5 on... two pipelines of three stages.
THREE = ([25, 31, 90, 17, 44, 12], [[(0, 0)], [(0, 1)], [(0, 2), (1, 0)], [(0, 3)], [(0, 4)], [(1, 1)]], 2)


@pytest.mark.parametrize(
    ("plan", "layers"),
    [
        (in_pipelines(ALONE, 2), 4),
        (in_pipelines(SHARED, 2), 4),
        (in_pipelines(IDLE, 2), 3),
        (in_pipelines(ALONE, 4), 5),
        (in_pipelines(THREE, 3), 3),
    ],
    ids=["2x1", "2x2", "2x2-idle", "4x1-5-layers", "3x2"],
)
def test_pipelines_equal_one_process(ranks: RankPool, plan: StepPlan, layers: int) -> None:
    check(ranks, plan, "llama", 1e-5, num_hidden_layers=layers)
    check(ranks, plan, "llama", 1e-12, num_hidden_layers=layers, checkpointing=True)


def test_layer_types_follow_their_layers(ranks: RankPool) -> None:
    check(ranks, in_pipelines(SHARED, 2), "gemma3_text", 1e-5, num_hidden_layers=7, tie_word_embeddings=False)


def test_tied_embeddings_on_different_stages(ranks: RankPool) -> None:
    check(ranks, in_pipelines(SHARED, 2), "llama", 1e-12, num_hidden_layers=4, tie_word_embeddings=True)
    check(ranks, in_pipelines(THREE, 3), "llama", 1e-5, num_hidden_layers=4, tie_word_embeddings=True)


def _loss_sum(ranks: Ranks, plan: StepPlan) -> float:
    return _pipeline_step(ranks, plan, "llama", torch.float32, False, {})[0]


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(plan=valid_plans(min_ranks=2, max_ranks=3, max_sequences=8, pp_size=2))
@pytest.mark.timeout(300)
def test_random_plans_end_and_agree_with_one_process(ranks: RankPool, plan: StepPlan) -> None:
    try:
        validate(plan)
    except PlanError as error:
        assert "cycle" in str(error)
        assume(False)
    alone = in_pipelines((plan.lengths.tolist(), [[(0, i)] for i in range(plan.num_sequences)], 1), 1)
    loss = ranks.run(1, _loss_sum, alone, timeout_s=30)[0]
    found = ranks.run(plan.hdp_size * 2, _loss_sum, plan, timeout_s=30)
    assert sum(found) == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("num_layers", "pp_size", "head_cost", "expected"),
    [
        (4, 1, 0.0, [4]),
        (4, 2, 0.0, [2, 2]),
        (8, 4, 3.0, [3, 2, 2, 1]),
        (5, 4, 0.0, [1, 1, 1, 2]),
        (8, 4, 1.0, [2, 2, 2, 2]),
        (7, 3, 4.0, [3, 3, 1]),
    ],
)
def test_layers_are_spread_evenly(num_layers: int, pp_size: int, head_cost: float, expected: list[int]) -> None:
    stages = split_layers(num_layers, pp_size, head_cost)
    assert [len(s) for s in stages] == expected
    assert [i for s in stages for i in s] == list(range(num_layers))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(UserError, match=r"pp_size = 5 needs as many layers, the model has 4"):
        split_layers(4, 5)
