"""Gangs, 1F1B and cycles, against brute force."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bytescale.plan.graph import connected_components, find_cycle, topological_order
from bytescale.plan.order import BACKWARD, FORWARD, gangs_of, one_f_one_b, operation_edges
from bytescale.plan.step_plan import StepPlan
from tests.plans import plan_of, valid_plans

Edges = list[tuple[int, int]]


@st.composite
def graphs(draw: st.DrawFn, max_nodes: int = 12) -> tuple[int, Edges]:
    num_nodes = draw(st.integers(1, max_nodes))
    node = st.integers(0, num_nodes - 1)
    return num_nodes, draw(st.lists(st.tuples(node, node), max_size=2 * max_nodes))


def columns(edges: Edges) -> tuple[np.ndarray, np.ndarray]:
    array = np.array(edges, dtype=np.int64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def reachable(num_nodes: int, edges: Edges) -> list[set[int]]:
    """Nodes that can be reached from each node by at least one edge."""
    out = [{b for a, b in edges if a == node} for node in range(num_nodes)]
    for via, node in itertools.product(range(num_nodes), repeat=2):
        if via in out[node]:
            out[node] |= out[via]
    return out


@given(graphs(max_nodes=30))
def test_components_agree_with_reachability(graph: tuple[int, Edges]) -> None:
    num_nodes, edges = graph
    undirected = edges + [(b, a) for a, b in edges]
    reach = reachable(num_nodes, undirected)
    expected = [min(reach[node] | {node}) for node in range(num_nodes)]
    assert connected_components(num_nodes, *columns(edges)).tolist() == expected


def test_components_of_a_long_path() -> None:
    order = np.random.default_rng(0).permutation(5000)
    assert (connected_components(5000, order[:-1], order[1:]) == 0).all()


@given(graphs())
def test_cycles_agree_with_reachability(graph: tuple[int, Edges]) -> None:
    num_nodes, edges = graph
    reach = reachable(num_nodes, edges)
    cycle = find_cycle(num_nodes, *columns(edges))
    assert bool(cycle) == any(node in reach[node] for node in range(num_nodes))
    for a, b in itertools.pairwise([*cycle, *cycle[:1]]):
        assert (a, b) in edges
    assert len(set(cycle)) == len(cycle)


@given(graphs())
def test_topological_order_respects_every_edge(graph: tuple[int, Edges]) -> None:
    num_nodes, edges = graph
    order = topological_order(num_nodes, *columns(edges)).tolist()
    place = {node: i for i, node in enumerate(order)}
    reach = reachable(num_nodes, edges)
    on_cycle = {node for node in range(num_nodes) if node in reach[node]}
    behind = on_cycle.union(*(reach[node] for node in on_cycle))
    assert set(order) == set(range(num_nodes)) - behind
    assert len(order) == len(place)
    assert all(place[a] < place[b] for a, b in edges if b in place)


@given(st.integers(0, 12), st.integers(1, 6), st.data())
def test_one_f_one_b(num_micro_batches: int, pp_size: int, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, pp_size - 1))
    order = one_f_one_b(num_micro_batches, pp_size, stage)
    forwards = [m for m, direction in order if direction == FORWARD]
    backwards = [m for m, direction in order if direction == BACKWARD]
    assert forwards == backwards == list(range(num_micro_batches))
    in_flight = most = 0
    done: set[int] = set()
    for micro_batch, direction in order:
        if direction == FORWARD:
            done.add(micro_batch)
        else:
            assert micro_batch in done
        in_flight += 1 if direction == FORWARD else -1
        most = max(most, in_flight)
    assert most == min(num_micro_batches, pp_size - stage)
    if stage == pp_size - 1:
        assert order == [(m, direction) for m in range(num_micro_batches) for direction in (FORWARD, BACKWARD)]


@given(valid_plans())
def test_gangs_are_the_micro_batches_that_share_sequences(plan: StepPlan) -> None:
    ids = plan.micro_batch_ids()
    members = {s: set(ids[plan.pieces.sequence == s].tolist()) for s in range(plan.num_sequences)}
    edges = [(a, b) for group in members.values() for a in group for b in group]
    reach = reachable(int(ids.max()) + 1, edges)
    gangs = gangs_of(plan)
    for a, b in itertools.product(range(len(gangs.gang)), repeat=2):
        assert (gangs.gang[a] == gangs.gang[b]) == (b in reach[a])
    assert sorted(set(gangs.gang.tolist())) == list(range(gangs.num_gangs))
    first = [int(np.flatnonzero(gangs.gang == g)[0]) for g in range(gangs.num_gangs)]
    assert first == sorted(first)


@given(valid_plans(max_sequences=6), st.integers(2, 3))
def test_the_operation_graph_holds_1f1b_and_the_pipeline(plan: StepPlan, pp_size: int) -> None:
    piped = plan_of(plan.lengths.tolist(), _as_lists(plan), pp_size=pp_size)
    gangs = gangs_of(piped)
    num_nodes, source, target = operation_edges(piped, gangs)
    assert num_nodes == gangs.num_gangs * pp_size * 2
    edges = set(zip(source.tolist(), target.tolist(), strict=True))

    def node(gang: int, stage: int, direction: int) -> int:
        return (gang * pp_size + stage) * 2 + direction

    expected = set()
    for gang in range(gangs.num_gangs):
        for stage in range(pp_size - 1):
            expected.add((node(gang, stage, FORWARD), node(gang, stage + 1, FORWARD)))
            expected.add((node(gang, stage + 1, BACKWARD), node(gang, stage, BACKWARD)))
        expected.add((node(gang, pp_size - 1, FORWARD), node(gang, pp_size - 1, BACKWARD)))
    first = np.concatenate([[0], np.cumsum(piped.num_micro_batches())])
    for rank, count in enumerate(piped.num_micro_batches()):
        for stage in range(pp_size):
            order = one_f_one_b(int(count), pp_size, stage)
            nodes = [node(int(gangs.gang[first[rank] + m]), stage, direction) for m, direction in order]
            expected |= set(itertools.pairwise(nodes))
    assert edges == expected


def _as_lists(plan: StepPlan) -> list[list[list[int]]]:
    return [
        [plan.pieces.sequence[rows].tolist() for rows in plan.micro_batch_rows(rank)] for rank in range(plan.hdp_size)
    ]
