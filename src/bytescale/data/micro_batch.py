"""The tokens of one micro-batch of one rank, read where its plan says and nowhere else.

Invariant: labels are shifted inside the whole sequence before it is cut into pieces, so the label of a token is the
same on whatever rank it lands. Cost: a fixed number of numpy calls, whatever the number of pieces.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bytescale.arrays import IntArray, exclusive_sum
from bytescale.data.batches import GlobalBatch
from bytescale.data.dataset import SequenceDataset
from bytescale.errors import UserError
from bytescale.plan.step_plan import StepPlan
from bytescale.plan.zigzag import piece_runs

IGNORED_LABEL = -100


@dataclass(frozen=True, eq=False)
class TokenMicroBatch:
    """Tokens of one micro-batch of one rank; int64 arrays of shape [T], pieces in the order of the plan's rows.

    Attributes:
        input_ids: the tokens.
        labels: the next token of the same sequence, -100 at the sequence's last token.
        position_ids: index of each token inside its whole sequence.
    """

    input_ids: IntArray
    labels: IntArray
    position_ids: IntArray


def read_micro_batch(dataset: SequenceDataset, batch: GlobalBatch, plan: StepPlan, rows: IntArray) -> TokenMicroBatch:
    """Read the tokens of one micro-batch, and no others.

    Args:
        dataset: the sequences.
        batch: the global batch.
        plan: its plan, in zig-zag pieces of sequences or chunks.
        rows: rows of the micro-batch's pieces, as `plan.micro_batch_rows` gives them: ascending sequence.

    Raises:
        UserError: the plan is in the block layout.
    """
    degree, index = plan.pieces.cp_degree, plan.pieces.cp_index
    if degree is None or index is None:
        raise UserError(
            f'strategy {plan.strategy} places sequences in the "{plan.layout}" layout, which can be planned but not '
            "trained; choose a strategy of the zigzag layout"
        )
    sequence = plan.pieces.sequence[rows]
    lengths = batch.lengths[sequence]
    chunk_begin, chunk_end = plan.chunk_bounds(rows)
    # `piece_runs` works on columns as well: every field of `runs` has one entry a piece.
    runs_of: Callable[..., Any] = piece_runs
    runs = runs_of(chunk_end - chunk_begin, degree[rows], index[rows])
    begins = (np.stack([runs.front_begin, runs.back_begin], axis=1) + chunk_begin[:, None]).ravel()
    sizes = np.stack([runs.num_front_tokens, runs.num_back_tokens], axis=1).ravel()
    position_ids = _ranges(begins, sizes)
    piece_sizes = runs.num_tokens
    last = np.repeat(lengths - 1, piece_sizes)
    start = np.repeat(dataset.starts[batch.sequence_ids[sequence]], piece_sizes)
    labels = dataset.tokens[start + np.minimum(position_ids + 1, last)].astype(np.int64)
    labels[position_ids == last] = IGNORED_LABEL
    return TokenMicroBatch(
        input_ids=dataset.tokens[start + position_ids].astype(np.int64), labels=labels, position_ids=position_ids
    )


def _ranges(begins: IntArray, sizes: IntArray) -> IntArray:
    """begins[0], begins[0]+1, ... (sizes[0] of them), then those of begins[1], and so on."""
    shift = begins - exclusive_sum(sizes)
    values: IntArray = np.arange(sizes.sum(), dtype=np.int64) + np.repeat(shift, sizes)
    return values
