import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.config.data import DataConfig
from bytescale.data import SequenceDataset, open_dataset
from bytescale.data.documents.held_out import content_digests, is_held_out
from bytescale.errors import UserError
from tests.data.corpora import write_jsonl, write_tokenizer

TEXTS = [f"the cat sat on mat {i % 400}" for i in range(500)]


def sequences(dataset: SequenceDataset) -> list[tuple[int, ...]]:
    return [tuple(dataset.read(i, 0, int(length)).tolist()) for i, length in enumerate(dataset.lengths)]


def opened(tmp_path: Path, share: float, part: str, **settings: str) -> SequenceDataset:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": text} for text in TEXTS])
    config = DataConfig(source="jsonl", path=str(path), cache_dir=str(tmp_path / "c"), validation=share, **settings)
    return open_dataset(config, part=part)  # type: ignore[arg-type]


def test_the_parts_share_no_document(tmp_path: Path) -> None:
    whole, train, held_out = (opened(tmp_path, *case) for case in ((0.0, "train"), (0.2, "train"), (0.2, "validation")))
    assert sorted([*sequences(train), *sequences(held_out)]) == sorted(sequences(whole))
    # A hundred texts are there twice: both copies go the same way.
    assert not set(sequences(train)) & set(sequences(held_out))
    assert 0.12 < len(held_out) / len(whole) < 0.28
    assert f"({len(held_out)} in the other part" in train.counts.describe()
    assert (train.counts.documents, held_out.counts.other_part) == (len(train), len(train))
    assert "other part" not in whole.counts.describe()


def test_the_same_documents_in_every_tokenizer(tmp_path: Path) -> None:
    other = opened(tmp_path, 0.2, "validation", tokenizer=str(write_tokenizer(tmp_path / "t" / "tokenizer.json")))
    assert len(other) == len(opened(tmp_path, 0.2, "validation"))


@given(st.lists(st.binary(max_size=5)), st.floats(0, 0.999), st.floats(0, 0.999))
def test_a_larger_share_holds_out_what_a_smaller_one_does(contents: list[bytes], share: float, other: float) -> None:
    digests = content_digests(contents)
    small, large = (is_held_out(digests, s) for s in sorted((share, other)))
    assert not (small & ~large).any()
    assert not is_held_out(digests, 0.0).any()


def test_shares_are_met() -> None:
    digests = content_digests([json.dumps(i) for i in range(100_000)])
    for share in (0.001, 0.1, 0.5, 0.99):
        assert np.mean(is_held_out(digests, share)) == pytest.approx(share, rel=0.15)


def test_a_part_without_documents(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.validation = 0.0 of 500 documents leaves none for validation; raise it"):
        opened(tmp_path, 0.0, "validation")
    with pytest.raises(UserError, match=r"data.validation = 1.0; a share lies in 0..1, below 1"):
        opened(tmp_path, 1.0, "train")
