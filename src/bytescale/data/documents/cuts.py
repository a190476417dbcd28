"""Where documents that are longer than the context are cut: every `max_context` tokens, or where their text allows.

A part of a long document ends behind the last paragraph (a blank line) in the second half of what the context holds;
where there is none, behind the last line there; where there is none either, where the context is full. Invariants: the
parts are the document, in order, each of 1..max_context tokens; where nothing is asked of the text, all but the last
are full.

Cost: one decoding of each id of the vocabulary, and one reading of the long documents.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bytescale.arrays import IntArray, ceil_div, exclusive_sum
from bytescale.config.data import SplitAt
from bytescale.data.tokenizers import TokenArray, Tokenizer

BoolArray = npt.NDArray[np.bool_]
LEAST_SHARE = 0.5
"""Of the context, that a part which is cut at its text fills at least."""


@dataclass(frozen=True, eq=False)
class LineEnds:
    """What the tokens of a vocabulary do to lines; columns of shape [vocab_size].

    Attributes:
        split_at: the largest unit to end a part with.
        ends_line: whether the text of a token ends with a line break.
        ends_paragraph: whether it ends with a blank line.
        only_breaks: whether it is nothing but a line break and spaces: after the end of a line, a blank line.
    """

    split_at: SplitAt
    ends_line: BoolArray
    ends_paragraph: BoolArray
    only_breaks: BoolArray

    def breaks(self, tokens: TokenArray) -> tuple[IntArray, ...]:
        """Where parts of a document may end, behind which tokens: the best places first."""
        ends_line = self.ends_line[tokens]
        lines = np.flatnonzero(ends_line) + 1
        if self.split_at == "line":
            return (lines,)
        after_line = np.concatenate([[False], ends_line[:-1]])
        blank = self.ends_paragraph[tokens] | (self.only_breaks[tokens] & after_line)
        return np.flatnonzero(blank) + 1, lines


def line_ends(tokenizer: Tokenizer, split_at: SplitAt) -> LineEnds | None:
    """What the tokens of `tokenizer` do to lines; None where text does not decide."""
    if split_at == "token":
        return None
    texts = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
    ends = [text.rstrip(" \t").endswith("\n") for text in texts]
    breaks = [text.count("\n") for text in texts]
    tails = [len(text) - len(text.rstrip()) for text in texts]
    paragraph = [text[len(text) - tail :].count("\n") > 1 for text, tail in zip(texts, tails, strict=True)]
    only = [number > 0 and not text.strip() for text, number in zip(texts, breaks, strict=True)]
    return LineEnds(split_at, np.array(ends), np.array(paragraph) & ends, np.array(only) & ends)


def cut(
    starts: IntArray, lengths: IntArray, max_context: int, tokens: TokenArray, ends: LineEnds | None = None
) -> tuple[IntArray, IntArray]:
    """Cut every document (start, length) into parts of at most `max_context` tokens.

    Args:
        starts: first token of each document. Shape [num_documents].
        lengths: its tokens. Shape [num_documents].
        max_context: longest part.
        tokens: of all documents; read only where text decides.
        ends: where the text allows a cut; None cuts every `max_context` tokens.

    Returns:
        starts and lengths of all parts, in order.
    """
    if ends is not None:
        parts = [
            _at_text(ends.breaks(tokens[start : start + length]), length, max_context) + start
            if length > max_context
            else np.array([start])
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ]
        begins = np.concatenate([np.zeros(0, dtype=np.int64), *parts]).astype(np.int64)
        last = np.cumsum([len(part) for part in parts]) - 1
        stops = np.roll(begins, -1)
        stops[last] = starts + lengths
        return begins, stops - begins
    num_parts = ceil_div(lengths, max_context)
    first = exclusive_sum(num_parts)
    offset = (np.arange(num_parts.sum(), dtype=np.int64) - np.repeat(first, num_parts)) * max_context
    remaining = np.repeat(lengths, num_parts) - offset
    return np.repeat(starts, num_parts) + offset, np.minimum(remaining, max_context)


def _at_text(breaks: tuple[IntArray, ...], length: int, max_context: int) -> IntArray:
    """Where the parts of a document of `length` tokens begin."""
    begins = [0]
    while length - begins[-1] > max_context:
        full, least = begins[-1] + max_context, begins[-1] + max(1, int(LEAST_SHARE * max_context))
        stop = full
        for places in breaks:
            number = int(np.searchsorted(places, full, side="right"))
            if number and places[number - 1] >= least:
                stop = int(places[number - 1])
                break
        begins.append(stop)
    return np.array(begins, dtype=np.int64)
