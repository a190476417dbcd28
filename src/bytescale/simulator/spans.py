"""The timeline of chosen ranks as trace spans, which Perfetto draws and the report reads.

One process per rank; tracks `compute` (forward, backward, exposed communication and copies, waiting), `p2p`, `d2h`,
`h2d`; with a pipeline one of each a stage. Inside an operation kernels come first, then what they could not hide,
then waiting for the gang: the order within a layer is finer than the engine goes. Spans of a track never overlap and
end within the step. Cost: a few small objects per micro-batch, stage and direction of the chosen ranks.
"""

from collections.abc import Iterator, Sequence

from bytescale.arrays import exclusive_sum
from bytescale.errors import UserError
from bytescale.plan.order import BACKWARD, FORWARD, rank_order
from bytescale.simulator.engine import SimulatedStep
from bytescale.trace import Span, span_between

_NAMES = {FORWARD: "forward", BACKWARD: "backward"}


def step_spans(step: SimulatedStep, ranks: Sequence[int]) -> list[Span]:
    """Spans of `ranks`, in order of rank, stage and time.

    Raises:
        UserError: a rank that the plan does not have.
    """
    plan, extra = step.plan, step.overheads
    if wrong := [rank for rank in ranks if not 0 <= rank < plan.hdp_size]:
        raise UserError(f"rank {wrong[0]} is not in the plan; ranks are 0..{plan.hdp_size - 1}")
    counts = plan.num_micro_batches()
    first = exclusive_sum(counts)
    spans: list[Span] = []
    for rank in ranks:
        for stage in range(plan.pp_size):
            track = _track(step, stage)
            begin = extra.gather_s
            if extra.gather_s > 0:
                spans.append(span_between("gather parameters", "gather", 0.0, extra.gather_s, rank, track))
            last_end_ns = round(begin * 1e9)
            for span in _operations(step, rank, stage, int(first[rank]), begin):
                spans.append(span)
                last_end_ns = max(last_end_ns, span.end_ns)
            spans += _closing(step, rank, track, last_end_ns)
    return spans


def _track(step: SimulatedStep, stage: int) -> str:
    return "compute" if step.plan.pp_size == 1 else f"stage {stage}"


def _operations(step: SimulatedStep, rank: int, stage: int, first: int, begin: float) -> Iterator[Span]:
    operations, parts, track = step.operations, step.parts, _track(step, stage)
    others = "" if step.plan.pp_size == 1 else f"{track} "
    before = begin
    for number, direction in rank_order(step.plan, rank, stage):
        at = (direction, first + number, stage)
        start, end = begin + float(operations.start_s[at]), begin + float(operations.end_s[at])
        name = f"{_NAMES[direction]} micro-batch {number}"
        if start > before:
            yield span_between("wait", "wait", before, start, rank, track)
        clock = start
        exposed = (
            (parts.compute_s, _NAMES[direction]),
            (parts.tensor_s, "tensor"),
            (parts.communication_s, "communication"),
            (parts.copy_s, "copy"),
        )
        for table, category in exposed:
            until = min(clock + float(table[at]), end)
            if until > clock:
                yield span_between(name, category, clock, until, rank, track)
                clock = until
        if end > clock:
            yield span_between("wait for gang", "wait", clock, end, rank, track)
        copy_track = others + ("d2h" if direction == FORWARD else "h2d")
        for table, kind, where in ((parts.transfer_s, "p2p", f"{others}p2p"), (parts.copying_s, "offload", copy_track)):
            until = min(start + float(table[at]), end)
            if until > start:
                yield span_between(name, kind, start, until, rank, where)
        before = end


def _closing(step: SimulatedStep, rank: int, track: str, last_end_ns: int) -> Iterator[Span]:
    extra = step.overheads
    clock = extra.gather_s + step.makespan_s
    wait_ns = round(clock * 1e9) - last_end_ns
    if wait_ns > 0:
        yield Span("wait", "wait", last_end_ns, wait_ns, rank, track)
    closing = (("reduce gradients", extra.reduce_s), ("update", extra.update_s), ("input", step.exposed_input_s))
    for name, duration in closing:
        if duration > 0:
            yield span_between(name, name.split()[0], clock, clock + duration, rank, track)
            clock += duration
