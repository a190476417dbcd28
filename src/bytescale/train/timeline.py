"""The spans of a run as its trace file shows them: one clock, one process a rank, with a pipeline one track a stage.

With a pipeline the names are those of `bytescale.simulator.step_spans`: a process is an HDP rank, that is a pipeline,
and its stages are tracks ("stage 1", "stage 1 pipeline wait"), so that a real and a simulated step can be laid side by
side.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from bytescale.runtime.world import World
from bytescale.trace import Span


def to_wall_clock(steps: Iterable[Sequence[Span]]) -> list[Span]:
    """Spans from this process's `perf_counter_ns` to the wall clock, which the ranks of a machine share."""
    offset_ns = time.time_ns() - time.perf_counter_ns()
    return [replace(span, start_ns=span.start_ns + offset_ns) for spans in steps for span in spans]


def shift_to_zero(spans: Sequence[Span]) -> list[Span]:
    """Spans with their origin at the first of them."""
    origin_ns = min((span.start_ns for span in spans), default=0)
    return [replace(span, start_ns=span.start_ns - origin_ns) for span in spans]


def group_by_pipeline(spans: Sequence[Span], world: World) -> list[Span]:
    """Spans of this rank under its pipeline and stage; as they are where there is one stage."""
    if world.pp_size == 1:
        return list(spans)
    stage = f"stage {world.stage}"
    return [
        replace(span, rank=world.hdp_rank, track=stage if span.track == "compute" else f"{stage} {span.track}")
        for span in spans
    ]
