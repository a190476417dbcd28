"""The lines a run opens with, and the dry run that shows them and starts nothing."""

from pathlib import Path

import pytest

from bytescale import cli
from tests.train.runs import write_run
from tests.train.test_checkpoint import write_checkpoint, write_tokenizer


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, str]:
    """Name -> fact of the lines that a dry run prints; the others under the empty name."""
    assert cli.main(["train", *map(str, arguments), "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    lines = [line.split("  ", 1) for line in shown.out.splitlines()]
    return {line[0]: line[1].strip() if len(line) > 1 else "" for line in lines}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return write_run(tmp_path)


def test_a_fresh_model_says_what_it_takes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = dry_run(capsys, run, "--nproc", 2)
    assert facts["model"] == "llama (fresh weights, [model.config]), 2 layers, vocabulary 272, head not tied"
    assert facts["tokenizer"] == "byte, ids up to 256"
    ids = "begin none, end 256, pad none"
    assert facts["special tokens"] == f"nothing begins and 256 ends a document; the model's: {ids}"
    assert facts["template"] == "none"
    assert facts["context"].startswith("600 tokens, longer documents: split; the model's limit: ")
    assert facts["compute"] == "float32 on 2 ranks of one CPU process each, activations kept"
    assert facts["model saved"] == "run/model, float32"
    assert any(line.startswith("200 documents -> ") for line in facts)
    assert not (run.parent / "run").exists()


def test_a_checkpoint_brings_its_own(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    facts = dry_run(capsys, run, "--model.path", "checkpoint", "--data.max_context", 64, "--world", 3)
    assert facts["model"].startswith("llama (weights of checkpoint), 2 layers, vocabulary 97")
    assert facts["tokenizer"] == "checkpoint/tokenizer.json, ids up to 5; the checkpoint's own"
    assert facts["special tokens"] == "nothing begins and 1 ends a document; the model's: begin 0, end 1, pad 0"
    assert facts["template"].startswith("a chat template, saved with the model")
    assert facts["compute"].startswith("float32 on 3 ranks")
    other = write_tokenizer(tmp_path / "other.json", ["c"])
    facts = dry_run(capsys, run, "--model.path", checkpoint, "--data.tokenizer", other, "--data.max_context", 64)
    assert facts["tokenizer"] == "other.json, ids up to 4; the checkpoint brings another, which is not used or saved"


def test_a_dry_run_refuses_what_a_run_refuses(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--dry-run", "--parallel.pp_size", 3, "--nproc", 3], "needs as many layers"),
        (["--dry-run", "--world", 4, "--nproc", 3], "--world 4 and --nproc 3"),
        (["--world", 4], "--world is for --dry-run"),
        (["--dry-run", "--world", 0], "--world 0: at least 1 rank is needed"),
    ):
        assert cli.main(["train", str(run), *map(str, arguments)]) == 2
        assert words in capsys.readouterr().err
