"""Measuring does not hold a step up: marks are noted while it runs and read once, when it is over."""

import json
from itertools import pairwise

import numpy as np

from bytescale.data import GlobalBatch
from bytescale.plan.share import rank_share
from bytescale.trace import Span, trace_to_dict
from bytescale.train.measure.measurement import MAX_SEQUENCE_IDS, micro_batch_args
from bytescale.train.measure.step_clock import StepClock, without_overlap
from bytescale.train.measure.timeline import MAX_TRACED_RANKS, traced_ranks
from tests.plans import placed
from tests.runtime.models import step_data
from tests.traces import check_trace


class LateDevice:
    """A device that runs behind the host: nothing is known of a mark before `settle`, which may be called once."""

    def __init__(self) -> None:
        self.marks, self.settled = 0, 0

    def mark(self) -> int:
        assert not self.settled, "marked after the step was read"
        self.marks += 1
        return self.marks

    def settle(self) -> None:
        self.settled += 1

    def at_ns(self, mark: int) -> int:
        assert self.settled == 1, "read before the device got there"
        return 1000 * mark


def test_a_step_is_read_once_after_all_its_operations() -> None:
    device = LateDevice()
    clock = StepClock(device, rank=3)
    for number in range(5):
        clock.lap(f"forward micro-batch {number}", "forward", {"tokens": number})
        assert device.settled == 0
    spans = clock.read()
    assert device.settled == 1 and device.marks == 6
    assert [span.start_ns for span in spans] == [1000, 2000, 3000, 4000, 5000]
    assert all(a.end_ns == b.start_ns for a, b in pairwise(spans))
    assert [span.args for span in spans] == [{"tokens": number} for number in range(5)]


def test_waits_placed_by_another_clock_are_cut_to_fit() -> None:
    waits = [Span("wait kv", "wait", begin, duration, 0, "kv wait") for begin, duration in ((50, 30), (0, 60), (70, 5))]
    fitted = without_overlap(waits)
    check_trace(json.dumps(trace_to_dict([Span("x", "y", s.start_ns * 125, s.duration_ns * 125, 0) for s in fitted])))
    assert [(s.start_ns, s.end_ns) for s in fitted] == [(0, 60), (60, 80), (80, 80)]


def test_a_trace_samples_ranks_and_names_few_sequences() -> None:
    assert traced_ranks(3) == {0, 1, 2}
    for hdp_size in (64, 65, 1000, 131_072):
        chosen = traced_ranks(hdp_size)
        assert 0 in chosen and len(chosen) == MAX_TRACED_RANKS and max(chosen) < hdp_size
    plan = placed([5] * 20, [[(0, 0)]] * 20, 1)
    data = step_data(plan, 0)
    args = micro_batch_args(data, data.share.micro_batches[0])
    assert args == {
        "micro_batch": 0,
        "sequences": 20,
        "sequence_ids": list(range(MAX_SEQUENCE_IDS)),
        "tokens": 100,
        "cp_degree": 1,
    }
    assert isinstance(data.batch, GlobalBatch) and len(rank_share(plan, 0)) == 1
    assert json.dumps(args) and np.all(plan.lengths == 5)
