"""The spans of a run as its trace file shows them: one clock, one process a rank, with a pipeline one track a stage.

A rank's spans count with its own `perf_counter_ns` and are moved to the wall clock by one offset, taken once. Of many
ranks a sample is collected, whole pipelines evenly spread, packed small: the size of a trace does not grow with the
world. The TP ranks of an HDP rank do the same at the same time; the first of them is shown.

With a pipeline the names are those of `bytescale.simulator.step_spans`: a process is an HDP rank, that is a pipeline,
and its stages are tracks ("stage 1", "stage 1 pipeline wait"), so that a real and a simulated step can be laid side by
side.
"""

import json
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import astuple, replace

from bytescale.runtime.world import World
from bytescale.trace import Span

MAX_TRACED_RANKS = 64
"""Ranks of the HDP group that a trace shows."""
MAX_RANK_SPANS = 5_000
"""Spans of one rank in a trace; the longest."""


def gather_traces(world: World, steps: Iterable[Sequence[Span]]) -> list[list[Span]]:
    """The spans of the sampled ranks on rank 0, none elsewhere; a collective."""
    own: list[Span] = []
    if world.tp_rank == 0 and world.hdp_rank in traced_ranks(world.hdp_size):
        own = group_by_pipeline(to_wall_clock(steps), world)
        own = sorted(own, key=lambda span: -span.duration_ns)[:MAX_RANK_SPANS]
    packed = zlib.compress(json.dumps([astuple(span) for span in own]).encode())
    return [[Span(*values) for values in json.loads(zlib.decompress(data))] for data in world.gather_objects(packed)]


def traced_ranks(hdp_size: int) -> set[int]:
    """At most `MAX_TRACED_RANKS` of the ranks, evenly spread, the first among them."""
    count = min(hdp_size, MAX_TRACED_RANKS)
    return {number * hdp_size // count for number in range(count)}


def to_wall_clock(steps: Iterable[Sequence[Span]]) -> list[Span]:
    """Spans from this process's `perf_counter_ns` to the wall clock, which the ranks of a machine share."""
    offset_ns = time.time_ns() - time.perf_counter_ns()
    return [replace(span, start_ns=span.start_ns + offset_ns) for spans in steps for span in spans]


def shift_to_zero(spans: Sequence[Span]) -> list[Span]:
    """Spans with their origin at the first of them."""
    origin_ns = min((span.start_ns for span in spans), default=0)
    return [replace(span, start_ns=span.start_ns - origin_ns) for span in spans]


def group_by_pipeline(spans: Sequence[Span], world: World) -> list[Span]:
    """Spans of this rank under its HDP rank, with a pipeline under its stage."""
    if world.pp_size == 1:
        return [replace(span, rank=world.hdp_rank) for span in spans]
    stage = f"stage {world.stage}"
    return [
        replace(span, rank=world.hdp_rank, track=stage if span.track == "compute" else f"{stage} {span.track}")
        for span in spans
    ]
