import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel

from bytescale.config.data import DataConfig
from bytescale.data import check_vocab, load_tokenizer, open_dataset
from bytescale.data.tokenizers import ByteTokenizer
from bytescale.errors import UserError
from tests.data.corpora import write_tokenizer, write_tree


def config(tokenizer: Path | str, end_token: str | None = None, begin_token: str | int | bool = False) -> DataConfig:
    return DataConfig(source="python-stdlib", tokenizer=str(tokenizer), end_token=end_token, begin_token=begin_token)


@given(st.lists(st.text(), max_size=8))
def test_bytes_round_trip(texts: list[str]) -> None:
    tokens, lengths = ByteTokenizer().encode(texts)
    assert lengths.sum() == len(tokens)
    documents = np.split(tokens, np.cumsum(lengths)[:-1]) if texts else []
    assert [bytes(d[:-1].astype(np.uint8)).decode() for d in documents] == texts
    assert all(d[-1] == 256 and (d[:-1] < 256).all() for d in documents)


def test_byte_ids() -> None:
    tokenizer = load_tokenizer(config("byte"))
    tokens, lengths = tokenizer.encode([" é\n", "", "\0"])
    assert tokens.tolist() == [32, 0xC3, 0xA9, 10, 256, 256, 0, 256]
    assert lengths.tolist() == [5, 1, 2]
    assert (tokenizer.vocab_size, tokenizer.end_id) == (257, 256)
    with pytest.raises(UserError, match="end_token does not apply"):
        load_tokenizer(config("byte", end_token="</s>"))


def test_vocabulary_of_the_model() -> None:
    check_vocab(ByteTokenizer(), 257)
    check_vocab(ByteTokenizer(), 50_000)
    with pytest.raises(UserError, match=r"byte does not match the model: its ids reach 256, .* vocab_size 256"):
        check_vocab(ByteTokenizer(), 256)


def test_tokenizer_file(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    tokenizer = load_tokenizer(config(write_tokenizer(tmp_path / "tokenizer.json")))
    texts = [" the cat sat\n\n on ", "", "é漢\U0001f600", "the mat " * 40]
    tokens, lengths = tokenizer.encode(texts)
    assert lengths.sum() == len(tokens)
    assert int(tokens.max()) < tokenizer.vocab_size <= 300
    documents = np.split(tokens, np.cumsum(lengths)[:-1])
    assert [d[-1] for d in documents] == [tokenizer.end_id] * 4
    decode = tokenizer.library.decode
    # Neither padded nor truncated, though the file asks for both, and nothing stripped.
    assert [decode(d[:-1].tolist()) for d in documents] == texts
    assert lengths[1] == 1
    # A directory that holds the file is as good.
    assert load_tokenizer(config(tmp_path)).fingerprint == tokenizer.fingerprint


def test_text_that_the_vocabulary_cannot_hold(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    words = tokenizers.models.WordLevel(vocab={"word": 0, "</s>": 1}, unk_token="<unk>")
    tokenizers.Tokenizer(words).save(str(path))
    tokenizer = load_tokenizer(config(path))
    with pytest.raises(UserError, match=r"tokenizer\.json cannot encode the data: .*UNK"):
        tokenizer.encode(["word", "another"])


def test_empty_batch(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    for tokenizer in (ByteTokenizer(), load_tokenizer(config(write_tokenizer(tmp_path / "tokenizer.json")))):
        tokens, lengths = tokenizer.encode([])
        assert (len(tokens), len(lengths)) == (0, 0)


def test_end_token_is_found(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = write_tokenizer(tmp_path / "tokenizer.json", ["<pad>", "<|im_end|>", "<eos>", "stop"])
    ids = {name: i for i, name in enumerate(["<pad>", "<|im_end|>", "<eos>", "stop"])}
    assert load_tokenizer(config(path)).end_id == ids["<eos>"]
    settings = tmp_path / "tokenizer_config.json"
    for stated in ("stop", {"content": "stop"}):
        settings.write_text(json.dumps({"eos_token": stated}))
        assert load_tokenizer(config(path)).end_id == ids["stop"]
    settings.write_text(json.dumps({"eos_token": None}))
    assert load_tokenizer(config(path)).end_id == ids["<eos>"]
    chosen = load_tokenizer(config(path, end_token="<pad>"))
    assert chosen.end_id == ids["<pad>"]
    assert chosen.fingerprint != load_tokenizer(config(path)).fingerprint


def test_end_token_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = write_tokenizer(tmp_path / "tokenizer.json", ["<pad>"])
    with pytest.raises(UserError, match=r"none of the end tokens .*set data\.end_token"):
        load_tokenizer(config(path))
    with pytest.raises(UserError, match=r'data\.end_token = "</s>" is not in the vocabulary'):
        load_tokenizer(config(path, end_token="</s>"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(UserError, match=r'says eos_token "</s>", which the vocabulary lacks'):
        load_tokenizer(config(path))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"cannot read .*tokenizer_config\.json"):
        load_tokenizer(config(path))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"model": {"type": "Nope"}}', b"[]"])
def test_broken_tokenizer_file(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer\.json is not a valid tokenizer\.json") as caught:
        load_tokenizer(config(tmp_path / "tokenizer.json"))
    assert "\n" not in str(caught.value)


def with_template(path: Path, template: str) -> Path:
    """Let the file frame a text by a template such as `<s> $A </s>`."""
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer.from_file(str(path))
    special = [(name, library.token_to_id(name)) for name in template.split() if name != "$A"]
    library.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=special)
    library.save(str(path))
    return path


def test_begin_token(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json", ["<pad>", "<s>", "</s>"])
    plain = load_tokenizer(config(path))
    assert (plain.begin_id, plain.notes) == (None, ())
    for asked in ("<s>", 1):
        tokenizer = load_tokenizer(config(path, begin_token=asked))
        assert tokenizer.begin_id == 1
        tokens, lengths = tokenizer.encode(["the cat", ""])
        bare, bare_lengths = plain.encode(["the cat", ""])
        assert tokens.tolist() == [1, *bare[:-1].tolist(), 1, 2]
        assert lengths.tolist() == (bare_lengths + 1).tolist()
        assert tokenizer.fingerprint != plain.fingerprint
    with pytest.raises(UserError, match=r"has no begin token of its own; set data\.begin_token"):
        load_tokenizer(config(path, begin_token=True))
    for wrong in ("<bos>", 10**6, -1):
        with pytest.raises(UserError, match=r"data\.begin_token = .* is not in the vocabulary"):
            load_tokenizer(config(path, begin_token=wrong))
    with pytest.raises(UserError, match="begin_token does not apply to the byte tokenizer"):
        load_tokenizer(config("byte", begin_token=True))


@pytest.mark.parametrize("template", ["<s> $A", "<s> $A </s>"])
def test_the_begin_token_of_the_file(tmp_path: Path, template: str) -> None:
    path = with_template(write_tokenizer(tmp_path / "tokenizer.json", ["<pad>", "<s>", "</s>"]), template)
    assert load_tokenizer(config(path, begin_token=True)).begin_id == 1
    (note,) = load_tokenizer(config(path)).notes
    assert "puts <s> in front of a text, this run does not" in note
    assert load_tokenizer(config(path, begin_token=True)).notes == ()


def test_the_begin_token_beside_the_file(tmp_path: Path) -> None:
    path = with_template(write_tokenizer(tmp_path / "tokenizer.json", ["<pad>", "<s>", "</s>"]), "$A </s>")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}}')
    assert load_tokenizer(config(path, begin_token=True)).begin_id == 1
    assert load_tokenizer(config(path)).notes == ()
    with_template(path, "<s> <pad> $A")
    with pytest.raises(UserError, match="puts 2 tokens in front of a text"):
        load_tokenizer(config(path, begin_token=True))


def test_only_the_first_part_of_a_document_begins_with_the_token(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json", ["<s>", "</s>"])
    write_tree(tmp_path / "text", {"a": "zzzzzz", "b": "", "c": "z"})
    settings = {"tokenizer": str(path), "max_context": 4, "cache_dir": str(tmp_path / "cache")}
    base = DataConfig(source="text-tree", path=str(tmp_path / "text"), **settings)
    dataset = open_dataset(replace(base, begin_token="<s>"))
    z = dataset.read(0, 1, 2)[0]
    assert [dataset.read(i, 0, n).tolist() for i, n in enumerate(dataset.lengths.tolist())] == [
        [0, z, z, z],
        [z, z, z, 1],
        [0, z, 1],
    ]
    assert (dataset.counts.empty_dropped, dataset.counts.tokens) == (1, 11)
    assert open_dataset(base).counts.tokens == 9


def test_the_model_beside_the_tokenizer_knows_the_end_token(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    library = Library(WordLevel({"</s>": 0, "a": 1, "<|stop|>": 2}, "a"))
    library.save(str(path))
    assert load_tokenizer(config(path)).end_id == 0
    for stated, expected in (("2", 2), ("[2, 0]", 2), ("9", 0), ("null", 0), ("true", 0), ("[]", 0)):
        (tmp_path / "config.json").write_text(f'{{"eos_token_id": {stated}}}')
        assert load_tokenizer(config(path)).end_id == expected, stated
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    assert load_tokenizer(config(path)).end_id == 1


def test_no_tokenizer_file(tmp_path: Path) -> None:
    for name in ("bpe", tmp_path, tmp_path / "tokenizer.json"):
        with pytest.raises(UserError, match=r'does not exist; give "byte" or a tokenizer\.json file'):
            load_tokenizer(config(name))
    with pytest.raises(UserError, match="is no file"):
        load_tokenizer(config("/dev/null"))
