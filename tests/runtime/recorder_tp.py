"""The order of transfers with tensor parallelism: that of the HDP ranks, with the collectives of the TP ranks inside.

A collective is written down as an exchange of each TP rank with all others of its HDP rank, waited for at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from bytescale.plan.order import FORWARD
from bytescale.plan.step_plan import StepPlan
from bytescale.runtime.tensor_parallel.group import TensorGroup
from tests.runtime.recorder import Event, Post, Program, Splicer, Taken

START: Program = [Post("tp", (), ())]
FINISH: Program = [Taken("tp", 0)]
COLLECTIVE = START + FINISH


class TensorSplicer(Splicer):
    """`Splicer` of a dense model that `tp_size` ranks share."""

    def __init__(self, tp_size: int) -> None:
        super().__init__()
        self.tp_size = tp_size

    def programs_of(self, plan: StepPlan, num_layers: int = 2, recompute: bool = False) -> list[Program]:
        """Of every world rank: (stage * hdp_size + hdp_rank) * tp_size + tp_rank."""
        return [
            [
                with_peers(self._of_rank(event, tp_rank), rank * self.tp_size + tp_rank, self.tp_size)
                for event in program
            ]
            for rank, program in enumerate(super().programs_of(plan, num_layers, recompute))
            for tp_rank in range(self.tp_size)
        ]

    def _of_rank(self, event: Event, tp_rank: int) -> Event:
        if not isinstance(event, Post):
            return event
        sends, receives = (
            tuple((peer * self.tp_size + tp_rank, tag) for peer, tag in ends) for ends in (event.sends, event.receives)
        )
        return Post(event.link, sends, receives)

    def _pass(
        self,
        plan: StepPlan,
        stage: int,
        exchanges: tuple[Program, Program],
        direction: int,
        num_layers: int,
        recompute: bool,
    ) -> Program:
        forward, backward = exchanges
        gather = add = COLLECTIVE
        embedding = COLLECTIVE if stage == 0 else []
        # Hidden states, two numbers a row, the gradients of the hidden states.
        loss = 3 * COLLECTIVE if stage == plan.pp_size - 1 else []
        if direction == FORWARD:
            return embedding + (gather + forward + add + gather + add) * num_layers + loss
        # The gradient of a layer's output is gathered before anything of the layer is needed; the recomputation then
        # stops when the last input is there.
        again = gather + forward + add + gather if recompute else []
        # The input of a block is gathered once more while its backward goes on.
        attention, mlp = START + backward + FINISH, START + FINISH
        return (gather + again + mlp + add + gather + attention + add) * num_layers + embedding


def with_peers(event: Event, rank: int, tp_size: int) -> Event:
    """A collective as world rank `rank` takes part in it; any other event as it is."""
    if event != START[0]:
        return event
    first = rank - rank % tp_size
    others = tuple((first + t, 0) for t in range(tp_size) if first + t != rank)
    return Post("tp", others, others)


@contextmanager
def recorded_collectives(log: Program) -> Iterator[None]:
    """Write the collectives of a real rank down as well."""
    start: Any = TensorGroup._start
    finish: Any = TensorGroup.finish

    def started(*arguments: Any) -> Any:
        log.extend(START)
        return start(*arguments)

    def finished(*arguments: Any) -> Any:
        log.extend(FINISH)
        return finish(*arguments)

    with mock.patch.multiple(TensorGroup, _start=started, finish=finished):
        yield
