"""The one recurrence from the order of operations and their durations to the time of a step.

A gang computes together: it starts when its last member is ready and ends when its slowest member is done, since every
ring step passes through all of them. Over the operation graph of `bytescale.plan.order`, with d the slowest member,

    start(v) = max over edges (u, v) of end(u),        end(v) = start(v) + d(v),        step = max end.

Planner and simulator both call `makespan`, so what one predicts the other reproduces. Cost: one vectorised round per
level of the graph (about the largest number of micro-batches of a rank, times two with a pipeline).
"""

from dataclasses import dataclass

import numpy as np

from bytescale.arrays import FloatArray, IntArray
from bytescale.plan.order import Gangs, gangs_of, operation_edges
from bytescale.plan.step_plan import StepPlan


@dataclass(frozen=True)
class Makespan:
    """When each operation runs. Nodes are numbered as in `plan.order.operation_edges`.

    Attributes:
        gangs: the gangs of the plan.
        start_s, end_s: of each node. Without a pipeline a node is a gang, forward and backward together; with one it
            is (gang * pp_size + stage) * 2 + direction.
        step_time_s: end of the last node; 0 for an empty plan.
    """

    gangs: Gangs
    start_s: FloatArray
    end_s: FloatArray
    step_time_s: float


def makespan(plan: StepPlan, forward_s: FloatArray, backward_s: FloatArray) -> Makespan:
    """Run the recurrence.

    Args:
        plan: any executable plan.
        forward_s: own time of each micro-batch (numbered by `StepPlan.micro_batch_ids`) on each stage. [M, pp_size].
        backward_s: the same for the backward.

    Raises:
        ValueError: the operations of the plan wait for each other in a cycle.
    """
    gangs = gangs_of(plan)
    forward = _slowest_member(gangs, forward_s)
    backward = _slowest_member(gangs, backward_s)
    duration = (forward + backward).ravel() if plan.pp_size == 1 else np.stack([forward, backward], axis=2).ravel()
    num_nodes, source, target = operation_edges(plan, gangs)
    start = earliest_starts(num_nodes, source, target, duration)
    end = start + duration
    return Makespan(gangs=gangs, start_s=start, end_s=end, step_time_s=float(end.max(initial=0.0)))


def _slowest_member(gangs: Gangs, times_s: FloatArray) -> FloatArray:
    slowest = np.zeros((gangs.num_gangs, times_s.shape[1]))
    np.maximum.at(slowest, gangs.gang, times_s)
    return slowest


def earliest_starts(num_nodes: int, source: IntArray, target: IntArray, duration: FloatArray) -> FloatArray:
    """Longest-path start times over a graph given as edges; one vectorised round per level.

    Raises:
        ValueError: the graph has a cycle.
    """
    by_source = np.argsort(source, kind="stable")
    out_target = target[by_source]
    out_begin = np.searchsorted(source[by_source], np.arange(num_nodes + 1))
    num_out = np.diff(out_begin)
    waiting = np.bincount(target, minlength=num_nodes)
    start = np.zeros(num_nodes)
    level = np.flatnonzero(waiting == 0)
    num_done = 0
    while len(level):
        num_done += len(level)
        counts = num_out[level]
        total = int(counts.sum())
        if total == 0:
            break
        edge = np.repeat(out_begin[level] - np.cumsum(counts) + counts, counts) + np.arange(total)
        reached = out_target[edge]
        np.maximum.at(start, reached, np.repeat(start[level] + duration[level], counts))
        np.subtract.at(waiting, reached, 1)
        level = np.unique(reached[waiting[reached] == 0])
    if num_done < num_nodes:
        raise ValueError("the operations of the plan wait for each other in a cycle")
    return start
