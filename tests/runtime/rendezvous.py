"""Whether a set of recorded programs can hang under the rules of a back-end, decided by a graph without a cycle.

Each exchange has three moments: the host begins to post it (b), the host returns from posting it (r), its messages have
arrived and its buffers are free (c). An edge says "not before". For exchange p, the exchange q at the other end of one
of its messages, and the exchange o before p on the same link and rank:

    always       b(p) -> r(p); a rank's moments follow each other; a wait for p puts off what follows it
    gloo         a message is there when both ends have been posted: a wait for p follows b(q)
    NCCL         one exchange of a link at a time, both ends together: c(p) follows r(p), c(o), r(q) and c(o of q)
    + connect    the first message of a pair in a direction blocks the host until the other end: r(p) follows b(q)
    + sync       the host ends an operation only when all that it has posted is done

Nothing depends on timing, so some run hangs if and only if every run does, that is if the graph has a cycle. Edges only
delay: programs that pass under `STRICTEST`, which has every edge of NCCL's and whose waits imply those of gloo, pass
under all. Messages of a pair match in order, as NCCL does it; that their tags agree is checked.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from bytescale.plan.graph import topological_order
from tests.runtime.recorder import Drained, End, Post, Program, Taken


class Rules(NamedTuple):
    """What a back-end does."""

    one_at_a_time: bool
    sync: bool = False
    connect: bool = False


GLOO, NCCL = Rules(False), Rules(True)
NCCL_SYNC, NCCL_CONNECT = Rules(True, sync=True), Rules(True, connect=True)
STRICTEST = Rules(True, sync=True, connect=True)
ALL_RULES = GLOO, NCCL, NCCL_SYNC, NCCL_CONNECT, STRICTEST

Edges = tuple[list[int], list[int]]
"""From, to."""


class _Exchange:
    __slots__ = ("before", "first_uses", "id", "received_from", "sent_to")

    def __init__(self, number: int, before: "_Exchange | None") -> None:
        self.id, self.before = 3 * number, before
        self.sent_to: list[_Exchange] = []
        self.received_from: list[_Exchange] = []
        self.first_uses: list[_Exchange] = []


def _matched(programs: Sequence[Program]) -> list[list[_Exchange]]:
    """The exchanges of every rank, in the order of its posts, each with those at the other ends of its messages."""
    found: list[list[_Exchange]] = []
    sends, receives = defaultdict(list), defaultdict(list)
    number = 0
    for rank, program in enumerate(programs):
        own: list[_Exchange] = []
        newest: dict[str, _Exchange] = {}
        for event in program:
            if type(event) is not Post:
                continue
            link, outgoing, incoming = event
            exchange = newest[link] = _Exchange(number, newest.get(link))
            number += 1
            own.append(exchange)
            for peer, tag in outgoing:
                sends[link, rank, peer].append((exchange, tag))
            for peer, tag in incoming:
                receives[link, peer, rank].append((exchange, tag))
        found.append(own)
    assert sends.keys() == receives.keys(), "a message has no other end"
    for channel, sent in sends.items():
        received = receives[channel]
        assert [tag for _, tag in sent] == [tag for _, tag in received], f"messages of {channel} match others"
        for (p, _), (q, _) in zip(sent, received, strict=True):
            p.sent_to.append(q)
            q.received_from.append(p)
        sent[0][0].first_uses.append(received[0][0])
        received[0][0].first_uses.append(sent[0][0])
    return found


def edges_of(programs: Sequence[Program], rules: Rules) -> tuple[int, Edges]:
    """The graph of `programs` as (number of nodes, (from, to))."""
    matched = _matched(programs)
    num_exchanges = sum(map(len, matched))
    source: list[int] = []
    target: list[int] = []

    def edge(before: int, after: int) -> None:
        source.append(before)
        target.append(after)

    for own in matched:
        for p in own:
            b, r, c = p.id, p.id + 1, p.id + 2
            edge(b, r)
            if rules.connect:
                for q in p.first_uses:
                    edge(q.id, r)
            if not rules.one_at_a_time:
                continue
            edge(r, c)
            if p.before is not None:
                edge(p.before.id + 2, c)
            for q in (*p.sent_to, *p.received_from):
                edge(q.id + 1, c)
                if q.before is not None:
                    edge(q.before.id + 2, c)
    for rank, (program, own) in enumerate(zip(programs, matched, strict=True)):
        _host_edges(program, own, rules, 3 * num_exchanges + rank, edge)
    return 3 * num_exchanges + len(programs), (source, target)


def _host_edges(
    program: Program, own: list[_Exchange], rules: Rules, end: int, edge: Callable[[int, int], None]
) -> None:
    """The moments of one host, one after the other; `end` is its last."""
    upcoming = iter(own)
    posted: dict[str, list[_Exchange]] = defaultdict(list)
    sending: dict[str, list[_Exchange]] = defaultdict(list)
    done: dict[str, int] = defaultdict(int)
    after: list[int] = []

    def finished(p: _Exchange, others: Iterable[_Exchange]) -> None:
        after.extend([p.id + 2] if rules.one_at_a_time else [q.id for q in others])

    for event in program:
        kind = type(event)
        if kind is Post:
            link, sends, _ = event  # type: ignore[misc]
            p = next(upcoming)
            for node in after:
                edge(node, p.id)
            after = [p.id + 1]
            posted[link].append(p)
            if sends:
                sending[link].append(p)
        elif kind is Taken:
            link, back = event  # type: ignore[misc]
            p = posted[link][-1 - back]
            finished(p, p.received_from)
        elif kind is Drained:
            link, keep = event  # type: ignore[misc]
            until = len(sending[link]) - keep
            for p in sending[link][done[link] : until]:
                finished(p, p.sent_to)
            done[link] = max(done[link], until)
        elif kind is End and rules.sync:
            after += [own_link[-1].id + 2 for own_link in posted.values()]
    for node in after:
        edge(node, end)
    if rules.one_at_a_time:
        for own_link in posted.values():
            edge(own_link[-1].id + 2, end)


def hanging(step_programs: Iterable[Sequence[Program]], rules: Rules) -> list[bool]:
    """For each set of programs whether it hangs."""
    graphs = [edges_of(programs, rules) for programs in step_programs]
    first = np.cumsum([0] + [num_nodes for num_nodes, _ in graphs])
    ends = (
        np.concatenate(
            [np.array(graph[1][end], np.int64) + begin for graph, begin in zip(graphs, first[:-1], strict=True)]
        )
        for end in (0, 1)
    )
    reached = np.zeros(first[-1], dtype=bool)
    reached[topological_order(int(first[-1]), *ends)] = True
    return [not bool(reached[begin:end].all()) for begin, end in pairwise(first)]
