from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.config.data import DataConfig
from bytescale.data import build_dataset, open_dataset
from bytescale.errors import UserError
from tests.data.corpora import corpus_of, dataset_of, write_tree


def test_split() -> None:
    dataset = build_dataset(corpus_of([1, 4, 5, 9, 1, 2]), max_context=4, overlong="split")
    assert dataset.lengths.tolist() == [4, 4, 1, 4, 4, 1, 2]
    assert dataset.num_targets.tolist() == [3, 3, 0, 3, 3, 0, 1]
    assert dataset.reader.starts.tolist() == [1, 5, 9, 10, 14, 18, 20]
    counts = dataset.counts
    assert (counts.documents, counts.empty_dropped, counts.overlong_split, counts.overlong_dropped) == (6, 2, 2, 0)
    assert (counts.sequences, counts.tokens) == (7, 20)
    assert counts.describe() == "6 documents -> 7 sequences, 20 tokens (2 empty dropped, 2 overlong split)"


def test_drop() -> None:
    dataset = build_dataset(corpus_of([1, 4, 5, 9, 1, 2]), max_context=4, overlong="drop")
    assert dataset.lengths.tolist() == [4, 2]
    assert (dataset.counts.overlong_split, dataset.counts.overlong_dropped, dataset.counts.tokens) == (0, 2, 6)
    assert dataset.read(1, 0, 2).tolist() == [20, 21]


def test_error_names_document_length_and_limit() -> None:
    corpus = corpus_of([3, 4, 5, 9])
    with pytest.raises(UserError, match=r"document doc-2 has 5 tokens .*data\.max_context is 4"):
        build_dataset(corpus, max_context=4, overlong="error", name_of=lambda i: f"doc-{i}")
    assert len(build_dataset(corpus, max_context=9, overlong="error")) == 4


def test_nothing_to_predict() -> None:
    with pytest.raises(UserError, match=r"no sequence has a token to predict: 2 documents -> 0 .*2 empty dropped"):
        build_dataset(corpus_of([1, 1]), max_context=8)
    with pytest.raises(UserError, match="no sequence has a token to predict"):
        build_dataset(corpus_of([9, 9]), max_context=8, overlong="drop")


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(2, 12))
def test_split_keeps_every_token_of_documents_that_hold_any(lengths: list[int], max_context: int) -> None:
    if max(lengths) == 1:
        return
    corpus = corpus_of(lengths)
    dataset = build_dataset(corpus, max_context)
    assert dataset.lengths.max() <= max_context
    read = np.concatenate([dataset.read(i, 0, int(dataset.lengths[i])) for i in range(len(dataset))])
    kept = [corpus.tokens[a:b] for a, b in zip(corpus.offsets[:-1], corpus.offsets[1:], strict=True) if b - a > 1]
    np.testing.assert_array_equal(read, np.concatenate(kept))
    assert dataset.counts.tokens == len(read)


def test_read_stays_inside_the_sequence() -> None:
    dataset = dataset_of([3, 5])
    assert dataset.read(1, 1, 4).tolist() == [4, 5, 6]
    assert dataset.read(1, 2, 2).dtype == np.int64
    for wrong in ((1, 0, 6), (2, 0, 1), (-1, 0, 1), (0, 2, 1)):
        with pytest.raises(IndexError):
            dataset.read(*wrong)


def test_open_dataset(tmp_path: Path) -> None:
    write_tree(tmp_path / "text", {"a.txt": "abc", "b.txt": "", "c.txt": "abcdefgh"})
    settings = {"source": "text-tree", "path": str(tmp_path / "text"), "cache_dir": str(tmp_path / "cache")}
    dataset = open_dataset(DataConfig(**settings, max_context=6))
    assert dataset.lengths.tolist() == [4, 6, 3]
    assert dataset.read(0, 0, 4).tolist() == [*b"abc", 256]
    assert dataset.read(2, 0, 3).tolist() == [*b"gh", 256]
    with pytest.raises(UserError, match=r"document c\.txt has 9 tokens"):
        open_dataset(DataConfig(**settings, max_context=6, overlong="error"))
