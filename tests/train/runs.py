"""Runs of the real command line on a small corpus."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from tests.processes import CommandProcess, do_nothing, run_command

CONFIG = """
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
vocab_size = 272

[data]
source = "jsonl"
path = "{corpus}"
cache_dir = "{cache}"
max_context = 600

[batch]
tokens = 2400

[plan]
tokens_per_rank = 300

[train]
steps = 20
lr = 2e-3
warmup_steps = 2
compute_threads = 1

[run]
dir = "{run_dir}"
comm_timeout_s = 60
"""


def write_run(directory: Path) -> Path:
    """A corpus of skewed lengths and a configuration over it; returns the configuration's path."""
    random = np.random.default_rng(0)
    corpus = directory / "corpus.jsonl"
    words = ["alpha ", "beta ", "gamma\n", "delta, ", "x = 1\n", "é "]
    lines = []
    for length in np.exp(random.normal(4.0, 1.3, 200)).astype(int).clip(1, 590):
        text = "".join(random.choice(words, int(length)))[:length]
        lines.append(json.dumps({"text": text}))
    corpus.write_text("\n".join(lines))
    path = directory / "run.toml"
    path.write_text(CONFIG.format(corpus=corpus, cache=directory / "cache", run_dir=directory / "run"))
    return path


def start(*arguments: object) -> CommandProcess:
    """Begin `bytescale train`."""
    return CommandProcess(["train", *arguments], environment())


def environment() -> dict[str, str]:
    """This process's, without what would make a child think torchrun started it."""
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def train(
    *arguments: object, timeout_s: float = 110.0, before: Callable[[], None] = do_nothing
) -> subprocess.CompletedProcess[str]:
    """Run `bytescale train` to its end."""
    return run_command(["train", *arguments], environment(), timeout_s, before)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def weights(run_dir: Path) -> dict[str, Any]:
    """The tensors of the saved model, from however many files."""
    return {
        name: tensor for file in (run_dir / "model").glob("*.safetensors") for name, tensor in load_file(file).items()
    }
