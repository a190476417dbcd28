"""The question a strategy answers: these sequences, these ranks, this memory, this cost model.

`make_problem` checks every input once, so that strategies may trust it: lengths are positive integers, and a
sequence no set of ranks can hold is refused by name before anything is placed. Cost: O(sequences).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from bytescale.arrays import FloatArray, IntArray, ceil_div, first_not_whole
from bytescale.cost.model import CostModel
from bytescale.errors import UserError, counted
from bytescale.plan.memory import capacity_tokens
from bytescale.plan.validate import MAX_RANKS

Offload = Literal["auto", "off"] | float

OFFLOAD_CAP = 1.5
"""Most tokens of a rank under Eq. 3, as a multiple of C, where nothing else is asked; docs/offload.md says why."""

MAX_TOKENS = 2**48


@dataclass(frozen=True)
class Problem:
    """Checked input of a strategy.

    Attributes:
        lengths: tokens of each sequence, all at least 1. Shape [num_sequences].
        hdp_size: R.
        tokens_per_rank: C.
        num_layers: layers on one rank, ceil(layers / pp_size).
        cost: the cost model.
        context: longest sequence `static` must hold.
        pp_size: pipeline stages.
        offload: `auto`, `off`, or one ratio for every piece.
        offload_cap: most tokens of a rank as a multiple of C, where `auto` follows Eq. 3; at least 1.
        rank_speed: relative speed of each rank, mean 1, or None. Shape [hdp_size].
        seed: of any random search.
        allow_blocks: whether a search may return a plan in the "blocks" layout.
    """

    lengths: IntArray
    hdp_size: int
    tokens_per_rank: int
    num_layers: int
    cost: CostModel
    context: int
    pp_size: int = 1
    offload: Offload = "off"
    offload_cap: float = OFFLOAD_CAP
    rank_speed: FloatArray | None = None
    seed: int = 0
    allow_blocks: bool = False

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def fixed_ratio(self) -> float:
        """The offload ratio of every sequence when none is chosen per sequence."""
        return self.offload if isinstance(self.offload, float) else 0.0

    @property
    def fixed_capacity(self) -> int:
        """Tokens a micro-batch may hold at `fixed_ratio`."""
        return capacity_tokens(self.tokens_per_rank, self.fixed_ratio, self.num_layers)

    @property
    def largest_capacity(self) -> int:
        """Tokens a micro-batch may hold at the largest ratio allowed."""
        ratio = 1.0 if self.offload == "auto" else self.fixed_ratio
        return capacity_tokens(self.tokens_per_rank, ratio, self.num_layers)


def check_lengths(lengths: Sequence[int] | npt.ArrayLike) -> IntArray:
    """`lengths` as positive integers.

    Raises:
        UserError: empty, not a flat list of numbers, or one that is not a positive integer, by position and value.
    """
    try:
        values = np.asarray(lengths)
    except (ValueError, OverflowError):
        raise UserError("lengths must be a flat list of integers") from None
    if values.ndim != 1:
        raise UserError("lengths must be a flat list of integers")
    if not values.size:
        raise UserError("there are no sequences to plan: the list of lengths is empty")
    if values.dtype.kind not in "iuf":
        # numpy makes text of every number beside a text; as objects entries stay themselves.
        values = np.array(list(lengths) if isinstance(lengths, Sequence) else values, dtype=object)
        wrong = first_not_whole(values)
        if wrong is not None:
            raise UserError(f"lengths must be integers; sequence {wrong} is {lengths_entry(values, wrong)}")
        values = values.astype(np.int64)
    if values.dtype.kind == "f":
        broken = np.flatnonzero(~np.isfinite(values) | (values != np.floor(values)))
        if len(broken):
            i = int(broken[0])
            raise UserError(f"sequence {i} has length {lengths_entry(values, i)}; a length is a whole number of tokens")
    low = np.flatnonzero(values < 1)
    if len(low):
        i = int(low[0])
        raise UserError(f"sequence {i} has length {lengths_entry(values, i)}; a length is at least 1 token")
    if float(values.max()) > MAX_TOKENS:
        i = int(values.argmax())
        raise UserError(f"sequence {i} has length {lengths_entry(values, i)}; that is no token count")
    return values.astype(np.int64)


def lengths_entry(values: npt.NDArray[Any], i: int) -> str:
    """Entry `i` as it was written."""
    value = values[i].item() if hasattr(values[i], "item") else values[i]
    return repr(value)


def make_problem(
    lengths: Sequence[int] | npt.ArrayLike,
    *,
    hdp_size: int,
    tokens_per_rank: int,
    cost: CostModel,
    context: int | None = None,
    pp_size: int = 1,
    offload: str | float = "auto",
    offload_cap: float = OFFLOAD_CAP,
    seed: int = 0,
    rank_speed: Sequence[float] | npt.ArrayLike | None = None,
    allow_blocks: bool = False,
) -> Problem:
    """Check the input of a strategy.

    Args:
        lengths: tokens of each sequence.
        hdp_size: number of HDP ranks (with a pipeline: of pipelines).
        tokens_per_rank: activation capacity C of a rank for one micro-batch, in tokens.
        cost: the cost model, see `bytescale.cost`.
        context: longest sequence `static` must hold; None is the longest of this batch.
        pp_size: pipeline stages.
        offload: `auto` chooses per sequence, `off` moves nothing, a number in [0, 1] is the ratio of every piece.
        offload_cap: with `auto`, most tokens of a rank under Eq. 3 (`hdp-naive`, `hdp-balance`) as a multiple of
            tokens_per_rank; infinity is Eq. 3 as printed.
        seed: of the random part of a search, where a strategy has one.
        rank_speed: measured relative speed of each rank; None takes all as equal.
        allow_blocks: let `best` return a plan in the "blocks" layout where that is shorter; `train` cannot run one.

    Raises:
        UserError: one line that names what is wrong, and for a sequence that does not fit the ways out.
    """
    values = check_lengths(lengths)
    for name, number in (("hdp_size", hdp_size), ("tokens_per_rank", tokens_per_rank), ("pp_size", pp_size)):
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 1:
            raise UserError(f"{name} is {number}; it must be an integer of at least 1")
    for name, number, most in (("hdp_size", hdp_size, MAX_RANKS), ("tokens_per_rank", tokens_per_rank, MAX_TOKENS)):
        if number > most:
            raise UserError(f"{name} is {number}; the planner goes up to {most}")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise UserError(f"seed is {seed}; it must be an integer of at least 0")
    if pp_size > cost.num_layers:
        raise UserError(f"pp_size is {pp_size}, but the model has {cost.num_layers} layers; every stage needs one")
    problem = Problem(
        lengths=values,
        hdp_size=int(hdp_size),
        tokens_per_rank=int(tokens_per_rank),
        num_layers=ceil_div(cost.num_layers, int(pp_size)),
        cost=cost,
        context=int(values.max()) if context is None else int(context),
        pp_size=int(pp_size),
        offload=_check_offload(offload),
        offload_cap=_check_offload_cap(offload_cap),
        rank_speed=_check_speed(rank_speed, int(hdp_size)),
        seed=seed,
        allow_blocks=allow_blocks,
    )
    _check_fits(problem)
    return problem


def _check_offload(offload: Any) -> Offload:
    if isinstance(offload, str):
        if offload in ("auto", "off"):
            return "auto" if offload == "auto" else "off"
    elif isinstance(offload, int | float | np.floating) and not isinstance(offload, bool) and 0 <= offload <= 1:
        return float(offload)
    raise UserError(f"offload is {offload!r}; it is auto, off or a ratio in 0..1")


def _check_offload_cap(cap: Any) -> float:
    if isinstance(cap, int | float | np.floating) and not isinstance(cap, bool) and cap >= 1:
        return float(cap)
    raise UserError(f"offload_cap is {cap!r}; it is a multiple of tokens_per_rank, at least 1")


def _check_speed(rank_speed: Any, hdp_size: int) -> FloatArray | None:
    if rank_speed is None:
        return None
    speed = np.asarray(rank_speed, np.float64)
    if speed.shape != (hdp_size,):
        raise UserError(f"rank speeds have {speed.size} entries; hdp_size is {hdp_size}")
    if not np.all(np.isfinite(speed) & (speed > 0)):
        i = int(np.flatnonzero(~(np.isfinite(speed) & (speed > 0)))[0])
        raise UserError(f"the speed of rank {i} is {speed[i]}; a speed is a positive number")
    normalised: FloatArray = speed / speed.mean()
    return normalised


def _check_fits(problem: Problem) -> None:
    capacity = problem.largest_capacity
    longest = int(problem.lengths.max())
    if longest > capacity * problem.hdp_size:
        raise too_long(problem, int(problem.lengths.argmax()), capacity, problem.hdp_size)


def too_long(problem: Problem, sequence: int, capacity: int, num_ranks: int) -> UserError:
    """The refusal of a sequence that `num_ranks` ranks of `capacity` tokens cannot hold."""
    length = int(problem.lengths[sequence])
    needed = ceil_div(length, capacity)
    more = problem.offload != "auto" and capacity_tokens(problem.tokens_per_rank, 1.0, problem.num_layers) > capacity
    way_out = "use more ranks or allow offload" if more else "use more ranks"
    exist = "1 exists and holds" if num_ranks == 1 else f"{num_ranks} exist and hold"
    how = "" if capacity == problem.tokens_per_rank else f" ({problem.tokens_per_rank} and what is offloaded)"
    return UserError(
        f"sequence {sequence} has {counted(length, 'token')} and needs {counted(needed, 'rank')} of "
        f"{counted(capacity, 'token')}{how}; {exist} {num_ranks * capacity}: raise tokens_per_rank, or {way_out}"
    )
