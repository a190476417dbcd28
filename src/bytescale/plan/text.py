"""A plan as text that people read and write: one line a rank, micro-batches between bars.

    plan best: tokens_per_rank=8192 num_layers=32
    lengths: 16384 900 120
    rank 0: 0[0/2] | 2
    rank 1: 0[1/2]
    rank 2: 1
    rank 3:

A whole sequence is its number. `0[1/2]` is piece 1 of the 2 pieces of sequence 0, `0@0:4096` its tokens [0, 4096) (the
`blocks` and `chunks` layouts), and `~0.5` behind either is an offload ratio. The first line names what is not the
default: `pp_size`, `layout`, `kept_gradient_share`.

Invariant: `plan_from_text(plan_to_text(plan)) == plan`, prediction aside. Cost: O(pieces).
"""

import re
from collections.abc import Callable
from typing import get_args

import numpy as np

from bytescale.errors import UserError
from bytescale.plan.step_plan import Layout, StepPlan, step_plan
from bytescale.plan.zigzag import piece_tokens

MAX_SHOWN = 16
"""Ranks, micro-batches of a rank and pieces of a micro-batch that a shortened text shows."""

_DEFAULTS = {"pp_size": 1, "kept_gradient_share": 0.0, "layout": "zigzag"}
_PIECE = re.compile(
    r"(?P<sequence>\d+)(@(?P<begin>\d+):(?P<end>\d+))?(\[(?P<index>\d+)/(?P<degree>\d+)\])?(~(?P<ratio>[0-9.e+-]+))?"
)
_EXAMPLE = "a piece looks like 3, 3[0/2], 3@0:4096 or 3[0/2]~0.5"


def plan_to_text(plan: StepPlan, most: int | None = None) -> str:
    """`plan` as text.

    Args:
        plan: any plan, valid or not.
        most: limit on the ranks, micro-batches of a rank and pieces of a micro-batch that are shown; the rest is
            counted; None shows all, and only then can the text be read back.
    """
    scalars = {"tokens_per_rank": plan.tokens_per_rank, "num_layers": plan.num_layers}
    other = {name: getattr(plan, name) for name, default in _DEFAULTS.items() if getattr(plan, name) != default}
    head = f"plan {plan.strategy}: " + " ".join(f"{name}={value}" for name, value in (scalars | other).items())
    lines = [head, "lengths: " + " ".join(_shortened(plan.lengths.tolist(), most, "more"))]
    shown = plan.hdp_size if most is None else min(most, plan.hdp_size)
    for rank in range(shown):
        batches = [_micro_batch(plan, rows.tolist(), most) for rows in plan.micro_batch_rows(rank)]
        lines.append(f"rank {rank}: {' | '.join(_shortened(batches, most, 'micro-batches more'))}".rstrip())
    if shown < plan.hdp_size:
        lines.append(f"... {plan.hdp_size - shown} ranks more")
    return "\n".join(lines)


def _shortened(values: list[object] | list[int] | list[str], most: int | None, rest: str) -> list[str]:
    """The first `most` of `values` as words, and how many are left out."""
    words = [str(value) for value in (values if most is None else values[:most])]
    return words if len(words) == len(values) else [*words, f"... {len(values) - len(words)} {rest}"]


def _micro_batch(plan: StepPlan, rows: list[int], most: int | None) -> str:
    return " ".join(_shortened([_piece(plan, row) for row in rows], most, "pieces more"))


def _piece(plan: StepPlan, row: int) -> str:
    pieces = plan.pieces
    word = str(pieces.sequence[row])
    if pieces.token_begin is not None and pieces.token_end is not None:
        word += f"@{pieces.token_begin[row]}:{pieces.token_end[row]}"
    if pieces.cp_degree is not None and pieces.cp_index is not None and pieces.cp_degree[row] > 1:
        word += f"[{pieces.cp_index[row]}/{pieces.cp_degree[row]}]"
    return word + (f"~{float(pieces.offload_ratio[row])!r}" if pieces.offload_ratio[row] else "")


def plan_from_text(text: str) -> StepPlan:
    """The plan that `plan_to_text` wrote, or a person; it is not proven yet (`bytescale.validate`).

    Raises:
        UserError: the text is not a plan; the message names the line.
    """
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if len(lines) < 2:
        raise UserError("a written plan has a line `plan NAME: ...`, a line `lengths: ...` and one line a rank")
    strategy, scalars = _head(lines[0])
    lengths = _lengths(lines[1])
    rows = [piece for rank, line in enumerate(lines[2:]) for piece in _rank(rank, line, len(lengths))]
    return _assembled(strategy, scalars, lengths, rows, hdp_size=len(lines) - 2)


_SCALARS: dict[str, Callable[[str], int | float | str]] = {
    "tokens_per_rank": int,
    "num_layers": int,
    "pp_size": int,
    "kept_gradient_share": float,
    "layout": str,
}


def _head(line: str) -> tuple[str, dict[str, int | float | str]]:
    found = re.fullmatch(r"plan ([^:]*):(.*)", line)
    if found is None:
        raise UserError(f"line 1 of a written plan is {line!r}; it must be like `plan NAME: tokens_per_rank=8192`")
    scalars: dict[str, int | float | str] = {"num_layers": 1}
    for word in found[2].split():
        name, _, value = word.partition("=")
        if name not in _SCALARS:
            raise UserError(f"a written plan has no {name!r}; known: {', '.join(_SCALARS)}")
        try:
            scalars[name] = _SCALARS[name](value)
        except ValueError:
            raise UserError(f"{name} of a written plan is {value!r}; it must be a number") from None
    if "tokens_per_rank" not in scalars:
        raise UserError("line 1 of a written plan must say tokens_per_rank")
    return found[1].strip(), scalars


def _lengths(line: str) -> list[int]:
    name, colon, rest = line.partition(":")
    words = rest.split()
    if name != "lengths" or not colon or not words or not all(word.isdecimal() for word in words):
        raise UserError(f"line 2 of a written plan is {line!r}; it must be like `lengths: 16384 900 120`")
    return [int(word) for word in words]


_Row = tuple[int, int, int, re.Match[str]]
"""Rank, micro-batch, sequence, and the piece as it is written."""


def _rank(rank: int, line: str, num_sequences: int) -> list[_Row]:
    name, colon, rest = line.partition(":")
    if name != f"rank {rank}" or not colon:
        raise UserError(f"line {rank + 3} of a written plan is {line!r}; it must begin with `rank {rank}:`")
    rows: list[_Row] = []
    for number, batch in enumerate(rest.split("|") if rest.strip() else []):
        if not batch.strip():
            raise UserError(f"micro-batch {number} of rank {rank} of a written plan is empty: leave it out")
        for word in batch.split():
            found = _PIECE.fullmatch(word)
            if found is None:
                raise UserError(f"rank {rank} of a written plan has {word!r}; {_EXAMPLE}")
            if int(found["sequence"]) >= num_sequences:
                raise UserError(f"rank {rank} of a written plan has {word!r}, but there are {num_sequences} lengths")
            rows.append((rank, number, int(found["sequence"]), found))
    return rows


def _assembled(
    strategy: str, scalars: dict[str, int | float | str], lengths: list[int], rows: list[_Row], hdp_size: int
) -> StepPlan:
    layout = scalars.get("layout", "zigzag")
    if layout not in get_args(Layout):
        raise UserError(f"layout of a written plan is {layout!r}; known: {', '.join(get_args(Layout))}")
    words = [word for *_, word in rows]
    sequence = np.array([s for _, _, s, _ in rows], dtype=np.int64)
    begin = np.array([int(w["begin"] or 0) for w in words], dtype=np.int64)
    end = np.array([int(w["end"] or lengths[int(w["sequence"])]) for w in words], dtype=np.int64)
    index = np.array([int(w["index"] or 0) for w in words], dtype=np.int64)
    degree = np.array([int(w["degree"] or 1) for w in words], dtype=np.int64)
    if len(degree) and degree.min() < 1:
        raise UserError(f"a piece of a written plan has degree 0; {_EXAMPLE}")
    tokens = end - begin if layout == "blocks" else piece_tokens(end - begin, degree, index)
    return step_plan(
        strategy=strategy,
        hdp_size=hdp_size,
        tokens_per_rank=int(scalars["tokens_per_rank"]),
        num_layers=int(scalars["num_layers"]),
        pp_size=int(scalars.get("pp_size", 1)),
        kept_gradient_share=float(scalars.get("kept_gradient_share", 0.0)),
        lengths=lengths,
        sequence=sequence,
        rank=[rank for rank, *_ in rows],
        micro_batch=[number for _, number, *_ in rows],
        tokens=tokens,
        offload_ratio=np.array([_ratio(w) for w in words]),
        cp_degree=None if layout == "blocks" else degree,
        cp_index=None if layout == "blocks" else index,
        token_begin=None if layout == "zigzag" else begin,
        token_end=None if layout == "zigzag" else end,
    )


def _ratio(word: re.Match[str]) -> float:
    try:
        return float(word["ratio"] or 0.0)
    except ValueError:
        raise UserError(f"{word[0]!r} of a written plan has no offload ratio behind ~; {_EXAMPLE}") from None
