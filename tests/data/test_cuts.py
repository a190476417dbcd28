from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale.config.data import DataConfig, SplitAt
from bytescale.data import open_dataset
from bytescale.data.documents.cuts import cut, line_ends
from bytescale.data.tokenizers import ByteTokenizer, load_tokenizer
from tests.data.corpora import write_jsonl, write_tokenizer

BYTES = ByteTokenizer()


def parts_of(texts: list[str], max_context: int, split_at: SplitAt) -> list[bytes]:
    tokens, lengths = BYTES.encode(texts)
    starts = np.cumsum(lengths) - lengths
    begins, sizes = cut(starts, lengths, max_context, tokens, line_ends(BYTES, split_at))
    assert sizes.max() <= max_context and sizes.min() >= 1
    assert np.array_equal(np.concatenate([np.arange(b, b + n) for b, n in zip(begins, sizes, strict=True)]),
                          np.arange(len(tokens)))  # fmt: skip
    return [bytes(np.minimum(tokens[b : b + n], 255).astype(np.uint8)) for b, n in zip(begins, sizes, strict=True)]


def test_where_the_text_allows() -> None:
    text = "one two\nthree\n\nfour five\nsix seven"
    assert parts_of([text], 20, "paragraph") == [b"one two\nthree\n\n", b"four five\nsix seven\xff"]
    assert parts_of([text], 20, "line") == [b"one two\nthree\n\n", b"four five\nsix seven\xff"]
    assert parts_of([text], 13, "line") == [b"one two\n", b"three\n\n", b"four five\n", b"six seven\xff"]
    # No paragraph ends in the second half of what fits: the last line does.
    assert parts_of([text], 12, "paragraph")[0] == b"one two\n"
    assert parts_of(["x" * 30], 12, "paragraph") == [b"x" * 12, b"x" * 12, b"x" * 6 + b"\xff"]
    assert parts_of(["a\n \t\nbcdefgh"], 8, "paragraph")[0] == b"a\n \t\n"


@settings(deadline=None)
@given(
    st.lists(st.text("ab \n", min_size=1, max_size=60), min_size=1, max_size=4),
    st.integers(2, 30),
    st.sampled_from(["token", "line", "paragraph"]),
)
def test_every_token_stays(texts: list[str], max_context: int, split_at: SplitAt) -> None:
    parts = parts_of(texts, max_context, split_at)
    assert sum(map(len, parts)) == sum(len(text) + 1 for text in texts)


@pytest.mark.parametrize("split_at", ["token", "line", "paragraph"])
def test_the_tokens_of_a_file(tmp_path: Path, split_at: SplitAt) -> None:
    """Tokens of several characters: a part ends where its text does."""
    paragraphs = [f"the cat {i}\nsat on the mat {i}" for i in range(40)]
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "\n\n".join(paragraphs)}])
    tokenizer = write_tokenizer(tmp_path / "t" / "tokenizer.json")
    config = DataConfig(
        source="jsonl", path=str(path), tokenizer=str(tokenizer), max_context=70, split_at=split_at,
        cache_dir=str(tmp_path / "c"),
    )  # fmt: skip
    dataset = open_dataset(config)
    library = load_tokenizer(config)
    texts = [library.decode(dataset.read(i, 0, int(n)).tolist()) for i, n in enumerate(dataset.lengths)]
    assert "".join(texts) == "\n\n".join(paragraphs) + "</s>"
    ending = {"token": "", "line": "\n", "paragraph": "\n\n"}[split_at]
    assert all(text.endswith(ending) for text in texts[:-1])
    assert len(texts) > 5
