"""Nothing that the runtime posts can hang: its recorded order of transfers under the rules of every back-end.

The rules are in `rendezvous`, the recorder in `recorder`. The tests of the simulation itself show that it finds what is
wrong with orders that are known to hang.
"""

from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest

from bytescale.plan.order import BACKWARD, FORWARD, rank_order
from bytescale.plan.step_plan import StepPlan
from bytescale.plan.validate import PlanError, validate
from tests.plans import drawn, drawn_in_chunks, in_chunks, placed, plan_of
from tests.ranks import RankPool, Ranks
from tests.runtime.models import train_step
from tests.runtime.recorder import (
    Compute,
    Drained,
    End,
    Post,
    Program,
    Recording,
    Splicer,
    Taken,
    programs_of,
    without_idle_drains,
)
from tests.runtime.recorder_tp import TensorSplicer, recorded_collectives, with_peers
from tests.runtime.rendezvous import ALL_RULES, NCCL, NCCL_CONNECT, STRICTEST, hanging

Random = np.random.Generator


def whole_sequences(rng: Random, max_ranks: int, max_stages: int, max_sequences: int) -> StepPlan:
    """Waves of gangs, each on some of the ranks; valid or not."""
    hdp_size, num_sequences = int(rng.integers(1, max_ranks + 1)), int(rng.integers(1, max_sequences + 1))
    ranks: list[list[list[int]]] = [[] for _ in range(hdp_size)]
    for wave in np.array_split(rng.permutation(num_sequences), int(rng.integers(1, num_sequences + 1))):
        used = rng.permutation(hdp_size)[: int(rng.integers(1, hdp_size + 1))]
        fresh: dict[int, list[int]] = {}
        for sequence in sorted(wave.tolist()):
            degree = int(rng.integers(1, len(used) + 1)) if rng.random() < 0.5 else 1
            for rank in rng.permutation(used)[:degree].tolist():
                fresh.setdefault(rank, []).append(sequence)
        for rank, batch in fresh.items():
            ranks[rank].append(batch)
    lengths = rng.integers(1, 60, num_sequences).tolist()
    return plan_of(lengths, ranks, pp_size=int(rng.integers(1, max_stages + 1)))


def chunked_sequences(rng: Random, max_ranks: int, max_stages: int, max_sequences: int) -> StepPlan:
    """Each sequence in some chunks, on ranks that have equally many micro-batches by then."""
    counts = [0] * int(rng.integers(1, max_ranks + 1))
    lengths: list[int] = []
    chunks: list[Any] = []
    for _ in range(int(rng.integers(1, max_sequences + 1))):
        level = int(rng.choice(sorted(set(counts))))
        free = rng.permutation([rank for rank, count in enumerate(counts) if count == level])
        ranks = free[: int(rng.integers(1, len(free) + 1))].tolist()
        ends = np.cumsum(rng.integers(len(ranks), 20, int(rng.integers(1, 4)))).tolist()
        chunks.append([(end, [(rank, level + i) for rank in ranks]) for i, end in enumerate(ends)])
        lengths.append(ends[-1])
        for rank in ranks:
            counts[rank] += len(ends)
    return in_chunks(lengths, chunks, len(counts), pp_size=int(rng.integers(1, max_stages + 1)))


def valid_plans(num: int, seed: int, draw: Callable[..., StepPlan], *sizes: int) -> Iterator[StepPlan]:
    """The first `num` of the plans drawn that can be executed."""
    rng = np.random.default_rng(seed)
    while num:
        plan = draw(rng, *sizes)
        try:
            validate(plan)
        except PlanError:
            continue
        num -= 1
        yield plan


def hangs_of(splicer: Splicer, plans: Iterator[StepPlan], rules: Any = STRICTEST, prune: Any = None) -> list[bool]:
    """For each plan whether its programs hang; every other one recomputes its layers."""
    found: list[bool] = []
    batch: list[list[Program]] = []
    for number, plan in enumerate(plans):
        programs = splicer.programs_of(plan, num_layers=1, recompute=bool(number % 2))
        batch.append(prune(programs) if prune else programs)
        if len(batch) == 500:
            found += hanging(batch, rules)
            batch = []
    return found + (hanging(batch, rules) if batch else [])


@pytest.mark.timeout(300)
@pytest.mark.long
def test_no_plan_hangs_under_any_rules() -> None:
    splicer = Splicer()
    plans = valid_plans(9_000, 1, whole_sequences, 3, 4, 8)
    assert sum(hangs_of(splicer, plans)) == 0
    chunked = valid_plans(1_500, 2, chunked_sequences, 3, 3, 4)
    assert sum(hangs_of(splicer, chunked)) == 0
    few = [splicer.programs_of(plan) for plan in valid_plans(50, 3, whole_sequences, 4, 4, 12)]
    for rules in ALL_RULES:
        assert sum(hanging(few, rules)) == 0, rules


@pytest.mark.long
def test_no_plan_hangs_with_tensor_parallelism() -> None:
    for tp_size, num in ((2, 700), (3, 150)):
        splicer = TensorSplicer(tp_size)
        assert sum(hangs_of(splicer, valid_plans(num, 8, whole_sequences, 3, 3, 7))) == 0
        assert sum(hangs_of(splicer, valid_plans(num // 4, 9, chunked_sequences, 3, 3, 4))) == 0


def test_exchanges_of_attention_pass_also_where_they_connect_at_first_use() -> None:
    """One order, (step, kind), on all ranks: it holds up without the connections made at the start."""

    def unopened(programs: list[Program]) -> list[Program]:
        num_events = len([Post, Taken, Drained])
        return [program[num_events * (len(programs) - 1) :] for program in programs]

    plans = valid_plans(1_000, 4, whole_sequences, 6, 1, 8)
    assert sum(hangs_of(Splicer(), plans, prune=unopened)) == 0


def both_kinds(num: int) -> list[StepPlan]:
    whole = valid_plans(num, 5, whole_sequences, 3, 3, 8)
    return [*whole, *valid_plans(num, 6, chunked_sequences, 3, 3, 4)]


def test_what_is_put_together_is_what_a_run_would_post() -> None:
    splicer = Splicer()
    for number, plan in enumerate(both_kinds(25)):
        recompute = bool(number % 2)
        spliced = [without_idle_drains(program) for program in splicer.programs_of(plan, 2, recompute)]
        assert spliced == programs_of(plan, 2, recompute)


def channels(program: Program) -> set[tuple[str, str, int]]:
    return {
        (post.link, way, peer)
        for post in program
        if isinstance(post, Post)
        for way, ends in (("to", post.sends), ("from", post.receives))
        for peer, _ in ends
    }


def test_every_connection_is_made_at_the_start() -> None:
    for plan in both_kinds(25):
        num_opening = (plan.hdp_size - 1) + 2 * (plan.pp_size > 1)
        for program in programs_of(plan, num_layers=1):
            posts = [event for event in program if isinstance(event, Post)]
            assert channels(posts[num_opening:]) <= channels(posts[:num_opening])
            assert all(len(post.sends) == len(post.receives) == 1 for post in posts[:num_opening])


SHARED = drawn("40 61 90 20", "0 | 1[0/2] | 2 3", "1[1/2]", num_layers=4, pp_size=2)
RING = drawn("40 61 9", "0[0/3] 2", "0[1/3] | 1[0/2]", "0[2/3] | 1[1/2]", num_layers=4)
CHUNKS = drawn_in_chunks("60 20", "0@0:30[0/2] | 0@30:60[0/2]", "0@0:30[1/2] | 0@30:60[1/2] | 1@0:20")


def _posted(ranks: Ranks, plan: StepPlan, checkpointing: bool, tp_size: int = 1) -> Program:
    log: Program = []
    with recorded_collectives(log):
        train_step(
            ranks,
            plan,
            checkpointing=checkpointing,
            num_hidden_layers=2 * plan.pp_size,
            wrap=lambda link, inner: Recording(link, inner.rank, inner.world_ranks, log, inner),
            tp_size=tp_size,
        )
    return without_idle_drains(log)


@pytest.mark.parametrize("plan", [SHARED, RING, CHUNKS], ids=["pipelines", "ring", "chunks"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_real_run_posts_what_the_recorder_says(ranks: RankPool, plan: StepPlan, checkpointing: bool) -> None:
    posted = ranks.run(plan.hdp_size * plan.pp_size, _posted, plan, checkpointing)
    for real, program in zip(posted, programs_of(plan, 2, checkpointing), strict=True):
        assert real == without_idle_drains(event for event in program if not isinstance(event, End))


@pytest.mark.parametrize("plan", [SHARED, CHUNKS], ids=["pipelines", "chunks"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_real_run_with_tensor_parallelism_does_too(ranks: RankPool, plan: StepPlan, checkpointing: bool) -> None:
    programs = TensorSplicer(2).programs_of(plan, 2, checkpointing)
    for rank, posted in enumerate(ranks.run(len(programs), _posted, plan, checkpointing, 2)):
        program = without_idle_drains(event for event in programs[rank] if not isinstance(event, End))
        real, flush = posted[: len(program)], posted[len(program) :]
        assert [with_peers(event, rank, 2) for event in real] == program
        # The one-token micro-batch of the reduction: collectives alone.
        assert {event.link for event in flush} == {"tp"}  # type: ignore[union-attr]


class Grouped(Splicer):
    """What is known to hang: one communicator that connects at first use, opposite transfers in one group."""

    def _stage(self, plan: StepPlan, rank: int, busy: tuple[bool, ...]) -> Program:
        stage, hdp_rank = divmod(rank, plan.hdp_size)
        peers = {FORWARD: rank + plan.hdp_size, BACKWARD: rank - plan.hdp_size}
        ends = {FORWARD: plan.pp_size - 1, BACKWARD: 0}
        program: Program = []
        num_posts, received = 0, {}

        def post(sends: Any, receives: Any) -> None:
            nonlocal num_posts
            outgoing = tuple((peers[d], 2 * i + d) for i, d in sends)
            program.append(Post("pipe", outgoing, tuple((peers[1 - d], 2 * i + d) for i, d in receives)))
            received.update(dict.fromkeys(receives, num_posts))
            num_posts += 1

        order = rank_order(plan, hdp_rank, stage)
        for (number, direction), then in zip_longest(order, order[1:]):
            if busy[number]:
                if stage != ends[1 - direction]:
                    if (number, direction) not in received:
                        post([], [(number, direction)])
                    program.append(Taken("pipe", num_posts - 1 - received[number, direction]))
                program.append(Compute(number, direction))
                if stage != ends[direction]:
                    expected = then is not None and then[1] != direction and busy[then[0]]
                    post([(number, direction)], [then] if expected else [])
            program.append(End())
        return [*program, Drained("pipe", 0)]


def on_one_communicator(programs: list[Program]) -> list[Program]:
    """The programs as posted, less the waits for sends, with both directions of the pipeline on one link."""
    merged: list[Program] = []
    for program in programs:
        own: Program = []
        at: dict[str, list[int]] = {"forward": [], "backward": []}
        for event in program:
            if isinstance(event, Post | Taken) and event.link in at:
                if isinstance(event, Post):
                    at[event.link].append(sum(map(len, at.values())))
                    event = event._replace(link="pipe")
                else:
                    event = Taken("pipe", sum(map(len, at.values())) - 1 - at[event.link][-1 - event.back])
            if not isinstance(event, Drained):
                own.append(event)
        merged.append(own)
    return merged


def alone(num_micro_batches: int, pp_size: int) -> StepPlan:
    lengths = [30 + i for i in range(num_micro_batches)]
    return placed(lengths, [[(0, i)] for i in range(num_micro_batches)], 1, pp_size=pp_size, num_layers=pp_size)


@pytest.mark.parametrize("pp_size", [2, 4, 8])
def test_the_simulation_finds_what_connections_at_first_use_do(pp_size: int) -> None:
    """Opposite transfers in one group hang as soon as there are fewer micro-batches than stages."""
    for num in (1, 2, 3, 4, 7, 8, 9):
        programs = Grouped().programs_of(alone(num, pp_size))
        few = num < pp_size
        assert [hanging([programs], rules)[0] for rules in ALL_RULES] == [False, False, False, few, few]


def test_one_communicator_for_both_directions_hangs() -> None:
    plans = [plan for plan in valid_plans(300, 7, whole_sequences, 4, 4, 12) if plan.pp_size > 1]
    assert sum(hangs_of(Splicer(), iter(plans), NCCL)) == 0
    assert sum(hangs_of(Splicer(), iter(plans), NCCL, prune=on_one_communicator)) > len(plans) / 2


def test_most_plans_hang_if_opposite_transfers_are_grouped() -> None:
    plans = [plan for plan in valid_plans(300, 7, whole_sequences, 4, 4, 12) if plan.pp_size > 1]
    assert sum(hangs_of(Grouped(), iter(plans), NCCL)) == 0
    assert sum(hangs_of(Grouped(), iter(plans), NCCL_CONNECT)) > len(plans) / 2
