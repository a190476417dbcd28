"""Pipelines with unequal micro-batch counts against one process: loss, every gradient, and the order of operations."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

from bytescale.cost import preset_cost
from bytescale.plan.step_plan import StepPlan
from bytescale.plan.validate import PlanError, validate
from bytescale.runtime.model.stages import layer_ranges
from bytescale.simulator import simulate, step_spans
from tests.plans import placed, valid_plans
from tests.ranks import RankPool, Ranks
from tests.runtime.models import reference_step, train_step


def _step(ranks: Ranks, plan: StepPlan, architecture: str, options: dict[str, Any]) -> tuple[float, dict]:
    loss, gradients, _ = train_step(ranks, plan, architecture=architecture, **options)
    return loss, gradients


def check(
    ranks: RankPool, plan: StepPlan, architecture: str, bound: float, checkpointing: bool = False, **extra: Any
) -> None:
    dtype = torch.float64 if bound < 1e-9 else torch.float32
    master = torch.float64 if architecture == "llama" else torch.float32
    loss, gradients = reference_step(plan, architecture=architecture, master=master, **extra)
    options = {"dtype": dtype, "master": dtype, "checkpointing": checkpointing, **extra}
    seen = set()
    for found_loss, found, *_ in ranks.run(plan.hdp_size * plan.pp_size, _step, plan, architecture, options):
        assert abs(found_loss - loss) <= bound * loss
        for name, gradient in found.items():
            # A tied head is a copy of its own on the last stage.
            whole = name.replace("lm_head.weight", "model.embed_tokens.weight") if name not in gradients else name
            seen.add(whole)
            error = (gradient.double() - gradients[whole]).abs().max()
            assert error <= bound * gradients[whole].abs().max().clamp_min(1e-12), whole
    assert seen == set(gradients)


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


def _loss(ranks: Ranks, plan: StepPlan) -> float:
    return train_step(ranks, plan)[0]


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(plan=valid_plans(min_ranks=2, max_ranks=3, max_sequences=8, pp_size=2))
@pytest.mark.timeout(300)
@pytest.mark.long
def test_random_plans_end_and_agree_with_one_process(ranks: RankPool, plan: StepPlan) -> None:
    assume(int(plan.lengths.max()) > 1)
    try:
        validate(plan)
    except PlanError as error:
        assert "cycle" in str(error)
        assume(False)
    alone = in_pipelines((plan.lengths.tolist(), [[(0, i)] for i in range(plan.num_sequences)], 1), 1)
    loss = ranks.run(1, _loss, alone, timeout_s=30)[0]
    assert ranks.run(plan.hdp_size * 2, _loss, plan, timeout_s=30) == pytest.approx(
        [loss] * plan.hdp_size * 2, rel=1e-5
    )


def _operations(ranks: Ranks, plan: StepPlan) -> list[str]:
    _, _, result = train_step(ranks, plan, num_hidden_layers=3)
    return [span.name for span in result.spans if span.category in ("forward", "backward")]


@pytest.mark.parametrize("plan_of", [SHARED, IDLE, THREE])
@pytest.mark.parametrize("pp_size", [1, 2, 3])
def test_a_run_does_what_the_simulator_predicts_in_the_same_order(ranks: RankPool, plan_of: Any, pp_size: int) -> None:
    plan = in_pipelines(plan_of, pp_size)
    recorded = ranks.run(plan.hdp_size * pp_size, _operations, plan)
    spans = step_spans(simulate(plan, preset_cost("llama-7b", "h100")), range(plan.hdp_size))
    for rank in range(plan.hdp_size):
        for stage in range(pp_size):
            track = "compute" if pp_size == 1 else f"stage {stage}"
            predicted = [
                s.name
                for s in sorted(spans, key=lambda s: s.start_s)
                if s.rank == rank and s.track == track and s.category in ("forward", "backward")
            ]
            assert recorded[stage * plan.hdp_size + rank] == predicted


def test_stages_hold_neighbouring_layers() -> None:
    assert layer_ranges([3, 1, 2]) == [range(3), range(3, 4), range(4, 6)]
