"""The lines a run opens with, made before any rank exists."""

from pathlib import Path

from bytescale.config.overrides import parse_overrides
from bytescale.config.toml import load_config
from bytescale.train.prepare import prepare
from tests.data.corpora import write_jsonl
from tests.train.runs import write_run


def notes(directory: Path, arguments: str) -> tuple[str, ...]:
    config = load_config(write_run(directory), parse_overrides(arguments.split())[0])
    write_jsonl(directory / "corpus.jsonl", [{"text": "x" * n} for n in (99, 149, 199)])
    return prepare(config, 2).notes


def test_a_batch_larger_than_the_data_is_told(tmp_path: Path) -> None:
    first, second = notes(tmp_path, "--batch.tokens 100000 --train.steps 10")
    assert first == (
        "batch.tokens = 100,000 is more than the 450 tokens of the data: each document appears about 222 times in a "
        "step"
    )
    assert second == "10 steps go through the data about 2,222 times (epochs)"
    assert notes(tmp_path, "--batch.sequences 2 --train.steps 6") == (
        "6 steps go through the data about 4.0 times (epochs)",
    )
    assert notes(tmp_path, "--batch.tokens 450 --train.steps 1 --train.warmup_steps 0") == ()


def test_a_warm_up_longer_than_the_run_is_told(tmp_path: Path) -> None:
    (note,) = notes(tmp_path, "--batch.sequences 1 --train.steps 3 --train.warmup_steps 10 --train.lr 3e-4")
    assert note == (
        "train.warmup_steps = 10 is longer than the run of 3 steps: the rate ends at 9e-05, and train.lr = 0.0003 is "
        "never reached"
    )
