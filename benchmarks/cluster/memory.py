"""The longest sequence that trains within a host's memory: static, HDP, and HDP with activations offloaded.

One sequence over all hosts, beside a few short ones; a host that asks for more memory than it has is ended by the
kernel, so what fits is found by trying. Cost: some six short runs a way.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.cluster.settings import Setting, configuration
from benchmarks.cluster.trial import train
from bytescale.errors import RunError

MEMORY_BYTES = 384 << 20
"""Beside what a host shares with the process it was forked from: the imports."""

_HOSTS = Setting("memory", 4, 0.45, "1gbit", "", 1, layers_per_stage=16)
_WAYS = {
    "static": ("static", "off"),
    "hdp-balance": ("hdp-balance", "off"),
    "hdp-balance, offload": ("hdp-balance", 1.0),
}
_STEP_TOKENS = 1024
_MOST_TOKENS = 64 * 1024


def longest_sequences(directory: Path) -> dict[str, int]:
    """Way -> longest sequence in tokens, to within `_STEP_TOKENS`."""
    return {name: _longest(directory, strategy, offload) for name, (strategy, offload) in _WAYS.items()}


def _longest(directory: Path, strategy: str, offload: str | float) -> int:
    fits, too_long = 0, _MOST_TOKENS // _STEP_TOKENS
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if _trains(directory, strategy, offload, middle * _STEP_TOKENS):
            fits = middle
        else:
            too_long = middle
    return fits * _STEP_TOKENS


def _trains(directory: Path, strategy: str, offload: str | float, tokens: int) -> bool:
    corpus = directory / "memory" / f"{tokens}.jsonl"
    corpus.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(97, 123, length - 1))) for length in (tokens, 100, 200, 300)]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    setting = replace(_HOSTS, tokens_per_rank=-(-tokens // _HOSTS.num_hosts))
    run_dir = directory / "memory" / "run"
    text = configuration(
        setting, strategy, corpus, run_dir, 1, max_context=tokens, batch_tokens=tokens + 600, offload=offload
    )
    try:
        train(setting, text, run_dir, MEMORY_BYTES)
    except RunError:
        return False
    return True
