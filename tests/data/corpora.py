"""Small corpora and tokenizer files that the tests of this room share."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bytescale.data import SequenceDataset, build_dataset
from bytescale.data.cache import TokenCorpus
from bytescale.data.documents.held_out import content_digests


def corpus_of(lengths: Sequence[int]) -> TokenCorpus:
    """Documents of the given lengths, end token included, whose tokens are all different: 0, 1, 2, ..."""
    offsets = np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))])
    digests = content_digests([str(offset) for offset in offsets[:-1]])
    return TokenCorpus(tokens=np.arange(offsets[-1], dtype=np.uint32), offsets=offsets, digests=digests)


def dataset_of(lengths: Sequence[int]) -> SequenceDataset:
    """Sequences of the given lengths, at least 2 each or they are dropped as empty."""
    return build_dataset(corpus_of(lengths), max_context=1 << 40)


def write_tree(root: Path, files: dict[str, str | bytes]) -> Path:
    """Write files below `root`."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def write_tokenizer(path: Path, special_tokens: Sequence[str] = ("</s>",)) -> Path:
    """A tiny byte-level BPE tokenizer.json that pads and truncates, as saved files often do."""
    import tokenizers

    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special_tokens),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(["the cat sat on the mat", "the rat sat on the cat"] * 4, trainer)
    library.enable_padding(length=64)
    library.enable_truncation(max_length=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    library.save(str(path))
    return path


def write_jsonl(path: Path, records: Sequence[object]) -> Path:
    """One JSON value a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
