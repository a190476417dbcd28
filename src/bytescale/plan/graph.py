"""Connected components, an order and a cycle of a graph given as columns of edges.

Nodes are 0..num_nodes-1, edges (source[i], target[i]). Cost: a logarithmic number of vectorised rounds for components
in practice, one a level for the order.
"""

import numpy as np

from bytescale.arrays import IntArray


def connected_components(num_nodes: int, left: IntArray, right: IntArray) -> IntArray:
    """Lowest node number reachable from each node over the undirected edges (left[i], right[i]). Shape [num_nodes].

    Hooking and pointer jumping: a logarithmic number of vectorised rounds in practice.
    """
    label = np.arange(num_nodes, dtype=np.int64)
    while True:
        a, b = label[left], label[right]
        differ = a != b
        if not differ.any():
            return label
        np.minimum.at(label, np.maximum(a, b)[differ], np.minimum(a, b)[differ])
        while not np.array_equal(label, label[label]):
            label = label[label]


def topological_order(num_nodes: int, source: IntArray, target: IntArray) -> IntArray:
    """Nodes in an order that respects every edge; nodes on or behind a cycle are missing from it.

    Kahn's algorithm, one vectorised round per level; nodes of a level come in ascending number, so the order is unique.
    """
    by_source = np.argsort(source, kind="stable")
    out_target = target[by_source]
    out_begin = np.searchsorted(source[by_source], np.arange(num_nodes + 1))
    waiting = np.bincount(target, minlength=num_nodes)
    level = np.flatnonzero(waiting == 0)
    done: list[IntArray] = []
    while len(level):
        done.append(level)
        num_out = out_begin[level + 1] - out_begin[level]
        edge = np.repeat(out_begin[level] - np.cumsum(num_out) + num_out, num_out) + np.arange(num_out.sum())
        np.subtract.at(waiting, out_target[edge], 1)
        touched = np.unique(out_target[edge])
        level = touched[waiting[touched] == 0]
    return np.concatenate(done) if done else np.zeros(0, dtype=np.int64)


def find_cycle(num_nodes: int, source: IntArray, target: IntArray) -> list[int]:
    """The nodes of one cycle, in edge order; empty without a cycle."""
    blocked = np.ones(num_nodes, dtype=bool)
    blocked[topological_order(num_nodes, source, target)] = False
    if not blocked.any():
        return []
    inside = blocked[source] & blocked[target]
    predecessor = dict(zip(target[inside].tolist(), source[inside].tolist(), strict=True))
    node = int(np.flatnonzero(blocked)[0])
    position: dict[int, int] = {}
    while node not in position:
        position[node] = len(position)
        node = predecessor[node]
    return list(position)[position[node] :][::-1]
