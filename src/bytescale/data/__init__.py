"""Text in, planned batches out: sources, tokenizers, the token cache, sequences and the metadata-first loader.

Needs numpy alone; `tokenizers` and `pyarrow` are imported when a configuration asks for them. Typical use:

    tokenizer = load_tokenizer(config.data)
    check_vocab(tokenizer, vocab_size)
    dataset = open_dataset(config.data, tokenizer)
    with StepLoader(dataset, config.batch, config.train.seed, planner, hdp_rank, num_steps=100) as loader:
        for step in loader: ...
"""

from bytescale.data.batches import GlobalBatch, cut_batch, next_batch, repetition_notes, steps_until_end
from bytescale.data.dataset import DatasetCounts, Part, SequenceDataset, build_dataset, open_dataset
from bytescale.data.micro_batch import TokenMicroBatch, read_micro_batch
from bytescale.data.mixture.order import SequenceOrder
from bytescale.data.mixture.state import LoaderState, SourceState
from bytescale.data.reader import TokenReader
from bytescale.data.steps import StepData, StepLoader, StepSource, prepared_batches
from bytescale.data.tokenizers import Tokenizer, check_vocab, load_tokenizer

__all__ = [
    "DatasetCounts",
    "GlobalBatch",
    "LoaderState",
    "Part",
    "SequenceDataset",
    "SequenceOrder",
    "SourceState",
    "StepData",
    "StepLoader",
    "StepSource",
    "TokenMicroBatch",
    "TokenReader",
    "Tokenizer",
    "build_dataset",
    "check_vocab",
    "cut_batch",
    "load_tokenizer",
    "next_batch",
    "open_dataset",
    "prepared_batches",
    "read_micro_batch",
    "repetition_notes",
    "steps_until_end",
]
