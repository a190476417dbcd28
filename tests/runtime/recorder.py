"""The order in which the runtime posts its transfers, recorded from the code that posts them.

`Recording` stands in for a transport, or between a link and its transport, and writes down what passes. `programs_of`
runs the real stage code and the real attention exchanges of every rank of a plan, one rank after the other in this
process, on tensors that nobody fills. `spliced_programs` gives the same much faster: a stage's order and a
micro-batch's exchanges are recorded once for each form that they can have.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint

from bytescale.plan.order import BACKWARD, FORWARD, rank_order
from bytescale.plan.step_plan import StepPlan
from bytescale.runtime.attention.kept_kv import KeptKv
from bytescale.runtime.attention.kernels import CpuKernel
from bytescale.runtime.attention.ring import AttentionContext, distributed_attention
from bytescale.runtime.attention.work import AttentionWork, KeptRows, attention_work, local_work
from bytescale.runtime.p2p import PeerToPeer
from bytescale.runtime.pipeline import StageInput, run_stage
from bytescale.runtime.transport import Message, Pending, Transport
from bytescale.runtime.world import World, open_pipe

CPU = torch.device("cpu")
Ends = tuple[tuple[int, int], ...]
"""Messages as (rank, tag)."""


class Post(NamedTuple):
    """An exchange was posted on `link`; ranks are world ranks."""

    link: str
    sends: Ends
    receives: Ends


class Taken(NamedTuple):
    """The receives of the exchange posted `back` posts ago on `link` were waited for; 0 is the newest."""

    link: str
    back: int


class Drained(NamedTuple):
    """All exchanges with sends on `link` but the newest `keep` were waited for."""

    link: str
    keep: int


class Compute(NamedTuple):
    """Where the layers of an operation run, in the record of a stage without layers."""

    micro_batch: int
    direction: int


class End(NamedTuple):
    """The end of an operation of the schedule."""


Event = Post | Taken | Drained | Compute | End
Program = list[Event]


@dataclass
class Recording:
    """A transport that writes down what it is asked for, then asks `inner`, or does nothing."""

    link: str
    rank: int
    world_ranks: Sequence[int]
    log: Program
    inner: Transport | None = None
    num_posts: int = 0
    num_sending: int = 0

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Pending], list[Pending]]:
        self.log.append(Post(self.link, self._ends(sends), self._ends(receives)))
        post, sending = self.num_posts, self.num_sending
        self.num_posts += 1
        self.num_sending += bool(sends)
        outgoing, incoming = self.inner.exchange(sends, receives) if self.inner else ([], [])
        outgoing = outgoing or [(None, m.peer) for m in sends]  # type: ignore[misc]
        incoming = incoming or [(None, m.peer) for m in receives]  # type: ignore[misc]
        return (
            [(_Handle(self, None, sending, handle), peer) for handle, peer in outgoing],
            [(_Handle(self, post, None, handle), peer) for handle, peer in incoming],
        )

    def _ends(self, messages: Sequence[Message]) -> Ends:
        return tuple((self.world_ranks[m.peer], m.tag) for m in messages)


@dataclass
class _Handle:
    recording: Recording
    post: int | None
    sending: int | None
    inner: Any

    def wait(self, timeout: timedelta) -> object:
        made, log = self.recording, self.recording.log
        if self.post is not None:
            event: Event = Taken(made.link, made.num_posts - 1 - self.post)
            if log[-1:] != [event]:
                log.append(event)
        elif self.sending is not None:
            while log and isinstance(log[-1], Drained) and log[-1].link == made.link:
                log.pop()
            log.append(Drained(made.link, made.num_sending - 1 - self.sending))
        return self.inner.wait(timeout) if self.inner is not None else None


def recorded_world(plan: StepPlan, rank: int, log: Program) -> World:
    """World rank `rank` of a run of `plan`, without peers: what it posts goes to `log`, connections first."""
    size = plan.hdp_size * plan.pp_size
    stage, hdp_rank = divmod(rank, plan.hdp_size)
    members = range(stage * plan.hdp_size, (stage + 1) * plan.hdp_size)
    names = ("forward", "backward") if plan.pp_size > 1 else ()
    nobody: Any = None
    return World(
        rank=rank,
        size=size,
        hdp_rank=hdp_rank,
        hdp_size=plan.hdp_size,
        stage=stage,
        pp_size=plan.pp_size,
        device=CPU,
        everyone=nobody,
        group=nobody,
        comm=PeerToPeer(None, 1.0, CPU, transport=Recording("attention", hdp_rank, members, log)),
        pipe=open_pipe([Recording(name, rank, range(size), log) for name in names], plan.hdp_size, 1.0, CPU),
    )


@dataclass
class _Stand:
    """A model whose layers are attention alone, or nothing but a note in `log` of where they would run."""

    world: World
    num_layers: int
    recompute: bool = False
    log: Program | None = None
    compute_dtype: torch.dtype = torch.float32
    decoder: Any = field(default_factory=lambda: SimpleNamespace(config=SimpleNamespace(hidden_size=1)))

    def num_rows(self, num_tokens: int) -> int:
        return num_tokens

    def __call__(self, source: Any, labels_T: Any, position_ids_T: Any, context: AttentionContext) -> torch.Tensor:
        hidden_TE = source if not self.world.is_first else torch.zeros(len(source), 1, requires_grad=True)
        for layer in range(self.num_layers):
            if self.recompute:
                hidden_TE = torch.utils.checkpoint.checkpoint(
                    _attend, hidden_TE, context, layer, use_reentrant=False, preserve_rng_state=False
                )
            else:
                hidden_TE = _attend(hidden_TE, context, layer)
        if self.log is not None:
            hidden_TE = _Note.apply(hidden_TE, self.log, int(labels_T))
        return hidden_TE.sum() if self.world.is_last else hidden_TE[None]


def _attend(hidden_TE: torch.Tensor, context: AttentionContext, layer: int) -> torch.Tensor:
    rows = hidden_TE[:, None]
    return distributed_attention(rows, rows, rows, context, 1.0, layer)[:, 0]


class _Note(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TE: torch.Tensor, log: Program, number: int) -> torch.Tensor:  # type: ignore[override]
        ctx.log, ctx.number = log, number
        log.append(Compute(number, FORWARD))
        return hidden_TE.clone()

    @staticmethod
    def backward(ctx: Any, gradient_TE: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        ctx.log.append(Compute(ctx.number, BACKWARD))
        return gradient_TE, None, None


def _run(world: World, model: _Stand, works: Sequence[AttentionWork], order: Any, log: Program) -> None:
    kept = KeptKv()
    inputs = []
    for number, work in enumerate(works):
        ids_T = torch.zeros(work.num_tokens, dtype=torch.long)
        context = AttentionContext(work, CpuKernel(), world.comm, kept=kept)
        inputs.append(StageInput(ids_T, torch.tensor(number), ids_T, context))
    run_stage(model, inputs, world, order, lambda *_: log.append(End()))  # type: ignore[arg-type]
    world.comm.drain()


def programs_of(plan: StepPlan, num_layers: int = 2, recompute: bool = False) -> list[Program]:
    """What every world rank posts and waits for in a step of `plan`, from joining the groups on."""
    programs = []
    for rank in range(plan.hdp_size * plan.pp_size):
        log: Program = []
        world = recorded_world(plan, rank, log)
        order = rank_order(plan, world.hdp_rank, world.stage)
        _run(world, _Stand(world, num_layers, recompute), attention_work(plan, world.hdp_rank), order, log)
        programs.append(without_idle_drains(log))
    return programs


def without_idle_drains(program: Iterable[Event]) -> Program:
    """The events of `program` less the drains that have nothing to wait for, or wait for less than the one after."""
    sent: dict[str, int] = {}
    drained: dict[str, int] = {}
    left: Program = []
    for event in program:
        if isinstance(event, Post) and event.sends:
            sent[event.link] = sent.get(event.link, 0) + 1
        if isinstance(event, Drained):
            until = sent.get(event.link, 0) - event.keep
            if until <= drained.get(event.link, 0):
                continue
            drained[event.link] = until
            if left and isinstance(left[-1], Drained) and left[-1].link == event.link:
                left.pop()
        left.append(event)
    return left


class Splicer:
    """`programs_of`, assembled from stages and exchanges that were recorded once each."""

    def __init__(self) -> None:
        self.stages: dict[Any, Program] = {}
        self.exchanges: dict[Any, tuple[Program, Program]] = {}

    def programs_of(self, plan: StepPlan, num_layers: int = 2, recompute: bool = False) -> list[Program]:
        """As the function of that name, with drains that may have nothing to wait for."""
        works = [attention_work(plan, rank) for rank in range(plan.hdp_size)]
        programs = []
        for rank in range(plan.hdp_size * plan.pp_size):
            stage, hdp_rank = divmod(rank, plan.hdp_size)
            program: Program = []
            for event in self._stage(plan, rank, tuple(work.num_tokens > 0 for work in works[hdp_rank])):
                if isinstance(event, Compute):
                    exchanges = self._exchanges(works[hdp_rank][event.micro_batch], stage * plan.hdp_size)
                    program += self._pass(plan, stage, exchanges, event.direction, num_layers, recompute)
                else:
                    program.append(event)
            programs.append([*program, Drained("attention", 0)])
        return programs

    def _stage(self, plan: StepPlan, rank: int, busy: tuple[bool, ...]) -> Program:
        """A rank's record, with a note in the place of each operation's layers."""
        stage, hdp_rank = divmod(rank, plan.hdp_size)
        order = tuple(rank_order(plan, hdp_rank, stage))
        key = plan.hdp_size, plan.pp_size, rank, order, busy
        if key not in self.stages:
            log: Program = []
            world = recorded_world(plan, rank, log)
            _run(world, _Stand(world, 0, log=log), [local_work([1] * is_busy) for is_busy in busy], order, log)
            self.stages[key] = log
        return self.stages[key]

    def _pass(
        self,
        plan: StepPlan,
        stage: int,
        exchanges: tuple[Program, Program],
        direction: int,
        num_layers: int,
        recompute: bool,
    ) -> Program:
        """What the layers of a stage post and wait for in one operation."""
        forward, backward = exchanges
        if direction == FORWARD:
            return forward * num_layers
        return ((forward if recompute else []) + backward) * num_layers

    def _exchanges(self, work: AttentionWork, first_rank: int) -> tuple[Program, Program]:
        """What one layer posts and waits for in the forward and in the backward of a micro-batch."""
        steps = tuple(
            (tuple(p.peer for p in step.sends), tuple(p.peer for p in step.receives), bool(step.blocks))
            for step in work.steps
        )
        key = first_rank, steps, bool(work.kept_blocks)
        if key not in self.exchanges:
            self.exchanges[key] = _record_layer(work, first_rank)
        return self.exchanges[key]


class _Kept:
    """Keys and values of earlier chunks, as if they had been computed."""

    def put(self, *ignored: Any) -> None: ...

    def add_gradients(self, *ignored: Any) -> None: ...

    def take_gradients(self, *ignored: Any) -> None: ...

    def earlier(self, layer: int, rows: KeptRows) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        kv_SGD = torch.zeros(rows.end - rows.begin, 1, 1)
        return [kv_SGD], [kv_SGD]


def _record_layer(work: AttentionWork, first_rank: int) -> tuple[Program, Program]:
    """Forward and backward of one layer, after sends of an earlier one that are still under way."""
    log: Program = []
    members = range(first_rank, first_rank + 64)
    comm = PeerToPeer(None, 1.0, CPU, offsets=(), transport=Recording("attention", 0, members, log))
    earlier = [Message(0, torch.zeros(1), 0)]
    q_THD, kv_TGD = (torch.zeros(work.num_tokens, 1, 1, requires_grad=True) for _ in range(2))
    kept: Any = _Kept()
    context = AttentionContext(work, CpuKernel(), comm, kept=kept)
    programs = []
    comm.post("earlier", earlier, [])
    log.clear()
    out_THD = distributed_attention(q_THD, kv_TGD, kv_TGD, context, 1.0)
    programs.append(list(log))
    comm.post("earlier", earlier, [])
    log.clear()
    out_THD.sum().backward()  # type: ignore[no-untyped-call]
    return programs[0], list(log)
