"""What is measured: settings of the cluster, the strategies on each, and the configuration of a run.

A setting is hosts, their share of a core, their links, lengths, and the activation capacity. Lengths are those of a
named distribution divided by `_SCALE` and cut at `MAX_CONTEXT`, so that a batch is real in its shape and small in its
cost. On the fast link a ring step hides behind its attention as in the paper's Fig. 18; the slow one is five times as
slow.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bytescale.files import write_text_atomically
from bytescale.lengths.source import draw, length_source

_SCALE = 64
MAX_CONTEXT = 4096
_MIN_LENGTH = 8
BATCH_TOKENS = 65_536
_ALPHABET = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz \n", np.uint8)

FLAT = ("static", "megatron-dynamic", "hdp-naive", "hdp-balance", "flexible-cp", "best")
PIPELINED = ("static", "megatron-dynamic", "hdp-balance", "best", "chunked")


@dataclass(frozen=True)
class Setting:
    """A cluster and the lengths trained on it.

    Attributes:
        name: of the setting.
        num_hosts: one rank each.
        share: of a core that a host has.
        link_rate: of a link, as `tc` writes it.
        lengths: a named distribution.
        tokens_per_rank: activation capacity.
        pp_size: pipeline stages.
        strategies: what runs on it, the baseline first.
        slow_host: number of a host with half the share, unknown to the plan; None for none.
        layers_per_stage: of the model.
    """

    name: str
    num_hosts: int
    share: float
    link_rate: str
    lengths: str
    tokens_per_rank: int
    pp_size: int = 1
    strategies: tuple[str, ...] = FLAT
    slow_host: int | None = None
    layers_per_stage: int = 2

    def share_of(self, host: int) -> float:
        """Share of a core of one host."""
        return self.share / 2 if host == self.slow_host else self.share


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("byted-8", 8, 0.15, "200mbit", "byted", 1024),
        Setting("byted-8-slow-link", 8, 0.15, "40mbit", "byted", 1024),
        Setting("github-16", 16, 0.075, "200mbit", "github", 512),
        Setting("github-16-slow-link", 16, 0.075, "40mbit", "github", 512),
        Setting("byted-16", 16, 0.075, "200mbit", "byted", 512),
        Setting("github-8", 8, 0.15, "200mbit", "github", 1024),
        Setting("byted-2x4", 8, 0.15, "200mbit", "byted", 1024, 2, PIPELINED),
        Setting("github-2x8", 16, 0.075, "200mbit", "github", 512, 2, PIPELINED),
        Setting("slow-host", 8, 0.15, "200mbit", "byted", 1024, 1, ("hdp-balance", "best"), slow_host=3),
    )
}
"""Name -> setting."""


def configuration(
    setting: Setting,
    strategy: str,
    corpus: Path,
    run_dir: Path,
    steps: int,
    *,
    max_context: int = MAX_CONTEXT,
    batch_tokens: int = BATCH_TOKENS,
    offload: str | float = "off",
) -> str:
    """The configuration of a run, as TOML."""
    num_layers = setting.layers_per_stage * setting.pp_size
    return f"""
[model.config]
model_type = "llama"
hidden_size = 64
intermediate_size = 176
num_hidden_layers = {num_layers}
num_attention_heads = 4
num_key_value_heads = 2
vocab_size = 272
tie_word_embeddings = false

[data]
source = "jsonl"
path = {json.dumps(str(corpus))}
tokenizer = "byte"
max_context = {max_context}
cache_dir = {json.dumps(str(corpus.parent / "cache"))}

[batch]
tokens = {batch_tokens}

[parallel]
pp_size = {setting.pp_size}

[plan]
strategy = {json.dumps(strategy)}
tokens_per_rank = {setting.tokens_per_rank}
offload = {json.dumps(offload)}

[train]
steps = {steps}
device = "cpu"
compute_threads = 1

[run]
dir = {json.dumps(str(run_dir))}
save_model = false
overwrite = true
comm_timeout_s = 300
"""


def write_corpus(lengths: str, steps: int, path: Path) -> None:
    """Random text with scaled lengths, enough for `steps` batches without a second epoch; always the same."""
    rng = np.random.default_rng(0)
    lines: list[str] = []
    num_tokens = 0
    while num_tokens < (steps + 1) * BATCH_TOKENS:
        for length in np.clip(draw(length_source(lengths), 256, rng) // _SCALE, _MIN_LENGTH, MAX_CONTEXT):
            text = _ALPHABET[rng.integers(0, len(_ALPHABET), length - 1)].tobytes().decode()
            lines.append(json.dumps({"text": text}))
            num_tokens += int(length)
    write_text_atomically(path, "\n".join(lines) + "\n")
