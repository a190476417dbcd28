"""The documents that evaluations measure the loss of: where they come from, which of them, in what batches.

They are those of a source of their own, `[eval] path`, or those that `data.validation` keeps out of training. An
evaluation takes the same sequences every time, in one fixed order that does not depend on the seed of the run: all, or
the first ones up to `eval.tokens` or `eval.sequences`. They are cut into batches of the size of a training batch.
Invariant: the set depends on the data and `[eval]` alone, so its loss is the same number on any ranks.

Cost: one opening of the data; nothing is read before the first evaluation.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from bytescale.config.data import DataConfig
from bytescale.config.schema import BatchConfig, Config
from bytescale.data import (
    GlobalBatch,
    LoaderState,
    SequenceDataset,
    SequenceOrder,
    Tokenizer,
    cut_batch,
    next_batch,
    open_dataset,
)
from bytescale.data.sources.source import open_source
from bytescale.errors import UserError, counted

_ORDER_SEED = 0


@dataclass(frozen=True, eq=False)
class HeldOut:
    """What an evaluation runs.

    Attributes:
        dataset: the held-out sequences.
        batches: those of an evaluation, in order.
    """

    dataset: SequenceDataset
    batches: tuple[GlobalBatch, ...]

    @property
    def num_targets(self) -> int:
        return sum(batch.total_targets for batch in self.batches)

    def describe(self, every: int) -> str:
        """One line for a person."""
        sequences = sum(map(len, self.batches))
        tokens = counted(sum(batch.num_tokens for batch in self.batches), "token", ",")
        part = "all" if sequences == len(self.dataset) else f"{sequences:,} of {len(self.dataset):,}"
        when = "after the last step" if every == 0 else f"every {counted(every, 'step', ',')} and after the last"
        return f"evaluation {when}: {part} held-out sequences, {tokens}, in {counted(len(self.batches), 'batch')}"


@contextmanager
def _in_words_of_eval() -> Iterator[None]:
    """Let complaints about the data name the keys that `[eval]` has instead."""
    try:
        yield
    except UserError as error:
        message = str(error)
        for key in ("path", "source"):
            message = message.replace(f"data.{key}", f"eval.{key}")
        raise UserError(f"held-out documents: {message}") from None


def eval_data(config: Config) -> DataConfig | None:
    """`[data]` as it reads the own source of `[eval]`; None where there is none."""
    if config.eval.path is None and config.eval.source is None:
        return None
    source = config.eval.source or config.data.source
    with _in_words_of_eval():
        return replace(config.data, source=source, path=config.eval.path, validation=0.0, sources=())


def check_held_out(config: Config) -> None:
    """Whether there is something to evaluate where that is asked for, without reading it.

    Raises:
        UserError: there is not.
    """
    data = eval_data(config)
    if data is not None:
        with _in_words_of_eval():
            open_source(data)
    elif config.eval.every > 0 and config.data.validation == 0:
        raise UserError(
            f"eval.every = {config.eval.every} has nothing to evaluate; set data.validation, such as 0.01, or eval.path"
        )


def open_held_out(config: Config, tokenizer: Tokenizer) -> HeldOut | None:
    """The held-out sequences of a run; None where it evaluates nothing.

    Raises:
        UserError: they cannot be read, or have nothing to predict.
    """
    data = eval_data(config)
    if data is not None:
        with _in_words_of_eval():
            return held_out_batches(open_dataset(data, tokenizer), config)
    if config.data.validation > 0:
        return held_out_batches(open_dataset(config.data, tokenizer, "validation"), config)
    return None


def held_out_batches(dataset: SequenceDataset, config: Config) -> HeldOut:
    """What an evaluation takes of `dataset`.

    Raises:
        UserError: it has nothing to predict.
    """
    whole_tokens = int(dataset.lengths.sum())
    if config.eval.sequences is not None:
        taken = BatchConfig(sequences=min(config.eval.sequences, len(dataset)))
    else:
        taken = BatchConfig(tokens=min(config.eval.tokens or whole_tokens, whole_tokens))
    order = SequenceOrder(dataset, _ORDER_SEED)
    batch, _ = next_batch(dataset, taken, _ORDER_SEED, LoaderState(), order)
    held_out = HeldOut(dataset, tuple(cut_batch(batch, config.batch)))
    if held_out.num_targets == 0:
        raise UserError(
            f"the {counted(len(batch), 'sequence')} of an evaluation have no token to predict; raise eval.tokens or "
            "eval.sequences"
        )
    return held_out
