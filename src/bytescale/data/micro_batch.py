"""The tokens of one micro-batch of one rank, read where its plan says and nowhere else.

Invariant: labels are those of the whole sequence, so the label of a token is the same on whatever rank it lands. Cost:
one call of the reader for all micro-batches of a rank, whatever the number of pieces.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bytescale.arrays import IntArray
from bytescale.data.batches import GlobalBatch
from bytescale.data.dataset import SequenceDataset
from bytescale.data.reader import ranges
from bytescale.errors import UserError
from bytescale.plan.step_plan import StepPlan
from bytescale.plan.zigzag import piece_runs


@dataclass(frozen=True, eq=False)
class TokenMicroBatch:
    """Tokens of one micro-batch of one rank; int64 arrays of shape [T], pieces in the order of the plan's rows.

    Attributes:
        input_ids: the tokens.
        labels: the next token of the same sequence, -100 at the sequence's last token and where it is no target.
        position_ids: index of each token inside its whole sequence.
    """

    input_ids: IntArray
    labels: IntArray
    position_ids: IntArray


def read_micro_batches(
    dataset: SequenceDataset, batch: GlobalBatch, plan: StepPlan, rows_of: Sequence[IntArray]
) -> tuple[TokenMicroBatch, ...]:
    """Read the tokens of some micro-batches, and no others, in one call of the dataset's reader.

    Args:
        dataset: the sequences.
        batch: the global batch.
        plan: its plan, in zig-zag pieces of sequences or chunks.
        rows_of: rows of the pieces of each micro-batch, as `plan.micro_batch_rows` gives them: ascending sequence.

    Raises:
        UserError: the plan is in the block layout.
    """
    degree, index = plan.pieces.cp_degree, plan.pieces.cp_index
    if degree is None or index is None:
        raise UserError(
            f'strategy {plan.strategy} places sequences in the "{plan.layout}" layout, which can be planned but not '
            "trained; choose a strategy of the zigzag layout"
        )
    if not rows_of:
        return ()
    rows = np.concatenate(rows_of)
    chunk_begin, chunk_end = plan.chunk_bounds(rows)
    # `piece_runs` works on columns as well: every field of `runs` has one entry a piece.
    runs_of: Callable[..., Any] = piece_runs
    runs = runs_of(chunk_end - chunk_begin, degree[rows], index[rows])
    begins = (np.stack([runs.front_begin, runs.back_begin], axis=1) + chunk_begin[:, None]).ravel()
    sizes = np.stack([runs.num_front_tokens, runs.num_back_tokens], axis=1).ravel()
    sequences = np.repeat(batch.sequence_ids[plan.pieces.sequence[rows]], 2)
    input_ids, labels = dataset.reader.read_runs(sequences, begins, begins + sizes)
    # Where the micro-batches end in what was read.
    ends = np.concatenate([[0], np.cumsum(sizes)])[2 * np.cumsum([len(part) for part in rows_of])]
    columns = (np.split(column, ends[:-1]) for column in (input_ids, labels, ranges(begins, sizes)))
    return tuple(TokenMicroBatch(*parts) for parts in zip(*columns, strict=True))


def read_micro_batch(dataset: SequenceDataset, batch: GlobalBatch, plan: StepPlan, rows: IntArray) -> TokenMicroBatch:
    """Read the tokens of one micro-batch; see `read_micro_batches`."""
    return read_micro_batches(dataset, batch, plan, [rows])[0]
