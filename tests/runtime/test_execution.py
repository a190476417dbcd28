"""Random legal plans run to their end and are right; one document never sees another."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from bytescale.errors import CommunicationError
from bytescale.plan.step_plan import StepPlan
from bytescale.plan.validate import validate
from bytescale.plan.zigzag import piece_positions
from bytescale.runtime.attention.context import AttentionContext
from bytescale.runtime.attention.kernels import CpuKernel
from bytescale.runtime.attention.ring import distributed_attention
from bytescale.runtime.attention.work import attention_work
from bytescale.runtime.model.decoder import LossModel
from bytescale.train.agreement import check_same_step
from tests.plans import drawn, placed, valid_plans
from tests.ranks import RankPool, Ranks
from tests.runtime.models import small_decoder, step_data, train_step, world_of


def _loss_and_norm(ranks: Ranks, plan: StepPlan) -> tuple[float, float]:
    loss, gradients, _ = train_step(ranks, plan)
    return loss, float(torch.nn.utils.get_total_norm(list(gradients.values())))


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(plan=valid_plans(min_ranks=3, max_ranks=5, max_sequences=10))
@pytest.mark.timeout(300)
@pytest.mark.long
def test_random_plans_end_and_agree_with_one_rank(ranks: RankPool, plan: StepPlan) -> None:
    if int(plan.lengths.max()) < 2:
        return
    validate(plan)
    alone = placed(plan.lengths.tolist(), [[(0, i)] for i in range(plan.num_sequences)], 1)
    loss, norm = ranks.run(1, _loss_and_norm, alone, timeout_s=30)[0]
    for ours, our_norm in ranks.run(plan.hdp_size, _loss_and_norm, plan, timeout_s=30):
        assert ours == pytest.approx(loss, rel=1e-5)
        assert our_norm == pytest.approx(norm, rel=1e-4)


def _outputs(ranks: Ranks, plan: StepPlan, changed: int, position: int) -> dict[int, torch.Tensor]:
    """Final hidden states of the sequences on this rank, with one token of sequence `changed` replaced."""
    model = LossModel(small_decoder("llama"))
    world = world_of(ranks)
    outputs: dict[int, torch.Tensor] = {}
    data = step_data(plan, ranks.rank)
    works = attention_work(plan, ranks.rank)
    for rows, micro_batch, work in zip(plan.micro_batch_rows(ranks.rank), data.micro_batches, works, strict=True):
        begin = 0
        input_ids = torch.from_numpy(micro_batch.input_ids.copy())
        for row in rows:
            length = int(plan.lengths[plan.pieces.sequence[row]])
            held = piece_positions(length, int(plan.pieces.cp_degree[row]), int(plan.pieces.cp_index[row]))
            if plan.pieces.sequence[row] == changed and position in held:
                where = begin + held.tolist().index(position)
                input_ids[where] = (input_ids[where] + 1) % 97
            begin += len(held)
        context = AttentionContext(work, CpuKernel(), world.comm)
        with torch.no_grad():
            hidden = model.hidden_states(input_ids, torch.from_numpy(micro_batch.position_ids), context)
        begin = 0
        for row in rows:
            end = begin + int(plan.pieces.tokens[row])
            outputs[int(plan.pieces.sequence[row])] = hidden[begin:end]
            begin = end
    world.comm.drain()
    return outputs


@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize("position", [0, 150, 299])
def test_changing_a_token_leaves_other_documents_bitwise_equal(ranks: RankPool, degree: int, position: int) -> None:
    everywhere = [(r, 0) for r in range(degree)]
    plan = placed([300, 200, 33], [everywhere, everywhere, [(0, 0)]], degree)
    before = ranks.run(degree, _outputs, plan, -1, position)
    after = ranks.run(degree, _outputs, plan, 0, position)
    changed = False
    for a, b in zip(before, after, strict=True):
        for sequence, hidden in a.items():
            if sequence == 0:
                changed |= not torch.equal(hidden, b[sequence])
            else:
                assert torch.equal(hidden, b[sequence])
    assert changed


def _disagree(ranks: Ranks) -> str:
    lengths = [8, 8] if ranks.rank != 1 else [8, 9]
    plan = placed(lengths, [[(0, 0), (1, 0)], [(2, 0)]], 3)
    try:
        check_same_step(world_of(ranks), step_data(plan, ranks.rank))
    except CommunicationError as error:
        return str(error)
    return ""


def test_ranks_with_different_plans_are_refused_before_anything_runs(ranks: RankPool) -> None:
    for message in ranks.run(3, _disagree):
        assert "rank 1 made another plan than rank 0" in message


def _wait_for_nobody(ranks: Ranks) -> str:
    """Rank 0 waits for KV that rank 1 never sends."""
    comm = world_of(ranks, timeout_s=1.0).comm
    if ranks.rank != 0:
        return ""
    plan = drawn("64", "0[0/2]", "0[1/2]")
    context = AttentionContext(attention_work(plan, 0)[0], CpuKernel(), comm)
    x_TND = torch.randn(32, 4, 8)
    try:
        distributed_attention(x_TND, x_TND, x_TND, context, 1.0)
    except CommunicationError as error:
        return str(error)
    return ""


def test_a_wait_is_bounded_and_names_the_peer(ranks: RankPool) -> None:
    message = ranks.run(2, _wait_for_nobody, timeout_s=30)[0]
    assert "rank 0: kv transfer from rank 1 failed after" in message
    ranks.close()
