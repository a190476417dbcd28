"""Conversations: the mask of a template without marks equals that of its marks, and all equals Transformers."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bytescale.config.data import DataConfig
from bytescale.data import open_dataset
from bytescale.errors import UserError
from tests.data.corpora import write_jsonl, write_tokenizer

G, E = "{% generation %}", "{% endgeneration %}"
TEMPLATES = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
SPECIAL = sorted({"<s>", "</s>", *re.findall(r"<.?\w+.?>", " ".join(TEMPLATES.values()))} - {"<think>"})

CHATS = [
    [("user", "the cat?"), ("assistant", "sat on the mat")],
    [
        ("system", "be brief"),
        ("user", "the rat"),
        ("assistant", "the rat sat"),
        ("user", "on"),
        ("assistant", "on the cat"),
    ],
    [("user", "a"), ("assistant", "a"), ("user", "a"), ("assistant", "a"), ("user", "unanswered")],
    [("user", "x"), ("assistant", "<think>\nthe cat\n</think>\n\nthe mat"), ("user", "y"), ("assistant", "é 漢 ok")],
]


def messages(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]


def write_chat_tokenizer(directory: Path, template: str) -> Path:
    """The files that a tokenizer with a chat template is made of."""
    write_tokenizer(directory / "tokenizer.json", SPECIAL)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(template)
    return directory


def encoded(tmp_path: Path, tokenizer: Path, records: list[Any], **settings: Any) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of each conversation."""
    path = write_jsonl(tmp_path / "chats.jsonl", records)
    config = DataConfig(
        source="jsonl", path=str(path), content="messages", tokenizer=str(tokenizer), cache_dir=str(tmp_path / "cache"),
        max_context=4096, **settings,
    )  # fmt: skip
    dataset = open_dataset(config)
    every = np.arange(len(dataset))
    tokens, labels = dataset.reader.read_runs(every, np.zeros_like(every), dataset.lengths)
    cuts = np.cumsum(dataset.lengths)[:-1]
    found = [(t.tolist(), x.tolist()) for t, x in zip(np.split(tokens, cuts), np.split(labels, cuts), strict=True)]
    assert [sum(x >= 0 for x in row) for _, row in found] == dataset.num_targets.tolist()
    return found


def by_transformers(tokenizer: Path, chats: list[list[tuple[str, str]]]) -> list[tuple[list[int], list[int]]]:
    """The same from a plain loop over `apply_chat_template` and its generation marks."""
    from transformers import AutoTokenizer

    plain = AutoTokenizer.from_pretrained(tokenizer)
    found = []
    for chat in chats:
        out = plain.apply_chat_template(messages(chat), return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = out["input_ids"], out["assistant_masks"]
        labels = [token if marked else -100 for token, marked in zip(ids[1:], mask[1:], strict=True)]
        found.append((list(ids), [*labels, -100]))
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_masks_equal_those_of_the_generation_marks(tmp_path: Path, name: str) -> None:
    marked = write_chat_tokenizer(tmp_path / "marked", TEMPLATES[name])
    expected = by_transformers(marked, CHATS)
    records = [{"messages": messages(chat)} for chat in CHATS]
    assert encoded(tmp_path, marked, records) == expected
    plain = write_chat_tokenizer(tmp_path / "plain", TEMPLATES[name].replace(G, "").replace(E, ""))
    assert encoded(tmp_path, plain, records) == expected
    whole = encoded(tmp_path, plain, records, loss="all")
    assert [labels for _, labels in whole] == [[*ids[1:], -100] for ids, _ in expected]


def test_templates_lie_where_transformers_looks(tmp_path: Path) -> None:
    records = [{"messages": messages(CHATS[0])}]
    expected = encoded(tmp_path, write_chat_tokenizer(tmp_path / "a", TEMPLATES["chatml"]), records)
    for stated in (TEMPLATES["chatml"], [{"name": "default", "template": TEMPLATES["chatml"]}]):
        directory = write_chat_tokenizer(tmp_path / "b", "")
        (directory / "chat_template.jinja").unlink()
        settings = json.loads((directory / "tokenizer_config.json").read_text())
        (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": stated}))
        assert encoded(tmp_path, directory, records) == expected
    directory = write_chat_tokenizer(tmp_path / "c", TEMPLATES["gemma"])
    (tmp_path / "own.jinja").write_text(TEMPLATES["chatml"])
    assert encoded(tmp_path, directory, records, chat_template=str(tmp_path / "own.jinja")) == expected
    sharegpt = [{"chat": [{"from": "human", "value": "the cat?"}, {"from": "gpt", "value": "sat on the mat"}]}]
    assert encoded(tmp_path, tmp_path / "a", sharegpt, messages_field="chat") == expected


CHAT = messages(CHATS[0])


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (
            {"messages": CHAT[:1]},
            "chats.jsonl:1: the conversation has no answer: none of its messages is the assistant's",
        ),
        ({"messages": []}, "chats.jsonl:1: the conversation has no answer"),
        ({"messages": "hello"}, 'chats.jsonl:1: "messages" holds text, not a list of messages'),
        ({"messages": [{"content": "x"}]}, 'chats.jsonl:1: message 1 has no "role"'),
        (
            {"messages": [{"role": "user", "content": 3}]},
            'chats.jsonl:1: message 1: "content" holds a number, not text',
        ),
        ({"chat": CHAT}, 'chats.jsonl:1 has no "messages"; set data.messages_field (known: chat)'),
        ({"messages": [*CHAT, {"role": "judge", "content": "x"}]}, "refuses it: Only user and assistant roles"),
        ({"messages": CHAT, "tools": "x"}, 'chats.jsonl:1: "tools" holds text, not a list of objects'),
    ],
)
def test_bad_conversations_are_named_or_skipped(tmp_path: Path, record: dict[str, Any], words: str) -> None:
    tokenizer = write_chat_tokenizer(tmp_path / "t", TEMPLATES["mistral"])
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        encoded(tmp_path, tokenizer, [record])
    assert "\n" not in str(caught.value)
    assert len(encoded(tmp_path, tokenizer, [record, {"messages": CHAT}], on_error="skip")) == 1


def test_templates_that_cannot_be_used(tmp_path: Path) -> None:
    records = [{"messages": messages(CHATS[1])}]

    def refusal(template: str, **settings: Any) -> str:
        with pytest.raises(UserError) as caught:
            encoded(tmp_path, write_chat_tokenizer(tmp_path / "t", template), records, **settings)
        return str(caught.value)

    # Says how many messages there are, so that no beginning of the text stays the same.
    counting = "{{ messages | length }}" + TEMPLATES["chatml"].replace(G, "").replace(E, "")
    assert "does not let message 3 be found, its text changes with what follows; mark it with" in refusal(counting)
    assert "chat_template.jinja refuses it" in refusal("{% for %}")
    assert "cannot read data.chat_template" in refusal("x", chat_template=str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="needs a tokenizer file with a chat template"):
        encoded(tmp_path, Path("byte"), records)
    (tmp_path / "t" / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json has no chat template beside it; set data.chat_template"):
        encoded(tmp_path, tmp_path / "t", records)
