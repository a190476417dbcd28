import json
from pathlib import Path
from typing import Any

import pytest

from bytescale.cli import main
from tests.data.corpora import write_jsonl
from tests.data.test_chat import CHATS, TEMPLATES, messages, write_chat_tokenizer

CONFIG = """
[model]
preset = "llama-tiny"
[data]
tokenizer = "{root}/t"
cache_dir = "{root}/cache"
validation = 0.2
on_error = "skip"
[[data.sources]]
name = "chats"
source = "jsonl"
path = "{root}/chats.jsonl"
content = "messages"
weight = 3
[[data.sources]]
name = "texts"
source = "jsonl"
path = "{root}/texts.jsonl"
weight = 1
[batch]
tokens = 300
[train]
steps = 40
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_chat_tokenizer(tmp_path / "t", TEMPLATES["qwen3"])
    chats = [{"messages": [*messages(chat), {"role": "user", "content": str(i)}]} for i in range(9) for chat in CHATS]
    write_jsonl(tmp_path / "chats.jsonl", [*chats, {"messages": []}])
    write_jsonl(tmp_path / "texts.jsonl", [{"text": f"the cat sat on {i} mats"} for i in range(60)])
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(root=tmp_path))
    return config


def run(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    code = main(["data", str(path), *options])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_what_a_run_would_see(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(path, capsys, "--json")
    assert code == 0
    seen: dict[str, Any] = json.loads(out)
    chats, texts = seen["sources"]
    assert (chats["name"], texts["name"], chats["weight"]) == ("chats", "texts", 0.75)
    assert chats["share"] == pytest.approx(0.75, abs=0.01)
    assert chats["left_out"]["bad documents skipped"] == 1
    assert chats["targets"] < chats["tokens"] - chats["sequences"]
    assert texts["targets"] == texts["tokens"] - texts["sequences"]
    assert seen["batches"] == 40
    assert seen["counts"]["targets"] == chats["targets"] + texts["targets"]
    assert any("skipped 1 document" in note and "chats.jsonl:37" in note for note in seen["notes"])
    held_out = json.loads(run(path, capsys, "--json", "--validation")[1])
    assert held_out["counts"]["documents"] + seen["counts"]["documents"] == 36 + 60
    assert [source["epochs"] for source in held_out["sources"]] == [1.0, 1.0]


def test_a_sequence_with_its_mask(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(run(path, capsys, "--json", "--sequence", "0", "--tokens", "1K")[1] or "null")
    assert shown is None
    shown = json.loads(run(path, capsys, "--json", "--sequence", "0", "--tokens", "1000")[1])["sequence"]
    assert sum(shown["is_target"]) == shown["targets"] > 0
    assert len(shown["ids"]) == len(shown["is_target"]) == shown["length"]
    trained = [part["text"] for part in shown["parts"] if part["is_target"]]
    assert trained[0].startswith("sat on the mat<|im_end|>")
    code, out, _ = run(path, capsys, "--sequence", "0", "--tokens", "1000")
    assert code == 0
    assert "sat on the mat<|im_end|>" in out
    assert "[[<|im_start|>user" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--sequence", "9999"), "there is no sequence 9999; the data has"),
        (("--data.sources.texts.path", "nowhere"), "source texts: data.path = "),
        (("--data.sources.chats.messages_field", "chat"), "no document in its 1 file under"),
        (("--data.sources.chats.chat_template", "nowhere"), "source chats: cannot read data.chat_template"),
        (("--data.tokenizer", "byte"), "source chats: data.content"),
        (("--batch",), "unknown option --batch; did you mean '--batches'?"),
    ],
)
def test_bad_input(path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str) -> None:
    code, out, err = run(path, capsys, *options)
    assert (code, out) == (2, "")
    assert words in err and err.count("\n") == 1
