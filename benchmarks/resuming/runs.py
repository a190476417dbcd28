"""`bytescale train` in a forked process: the real command line, imports apart, with functions of it patched at will.

What is patched is patched in the child alone, before the command begins, and so holds in its ranks, which are forks of
it: a run can be killed at an exact point without a switch for it in the program.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

CONFIG = """
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 52
num_hidden_layers = {layers}
num_attention_heads = 4
num_key_value_heads = 2
vocab_size = 272

[data]
source = "jsonl"
path = "{directory}/corpus.jsonl"
cache_dir = "{directory}/cache"
max_context = 300

[batch]
tokens = 1200

[plan]
tokens_per_rank = 300

[train]
steps = 6
lr = 1e-3
warmup_steps = 2
compute_threads = 1

[run]
save_model = {save_model}
comm_timeout_s = 60
"""
SAME = ("step", "loss", "grad_norm", "lr", "tokens", "sequences")
"""What is equal bit for bit on the same ranks."""

Patch = Callable[[], None]


def write_run(directory: Path, *, layers: int = 2, save_model: bool = True, num_documents: int = 200) -> Path:
    """A corpus of skewed lengths and a configuration over it; returns the configuration's path."""
    random = np.random.default_rng(0)
    lengths = np.exp(random.normal(4.0, 1.0, num_documents)).astype(int).clip(1, 290)
    texts = ["".join(random.choice(list("abcdefgh \n"), int(n))) for n in lengths]
    (directory / "corpus.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    path = directory / "run.toml"
    path.write_text(CONFIG.format(directory=directory, layers=layers, save_model=str(save_model).lower()))
    return path


class Command:
    """`bytescale train WORDS`, begun; output goes to a file."""

    def __init__(self, words: Sequence[object], log: Path, patch: Patch = lambda: None) -> None:
        self.log = log
        self.begin_s = time.monotonic()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setsid()
                handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(handle, 1)
                os.dup2(handle, 2)
                for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
                    os.environ.pop(name, None)
                patch()
                from bytescale import cli

                code = cli.main(["train", *map(str, words)])
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def wait(self, bound_s: float = 300.0) -> int:
        """Its exit code, negative for a signal; killed with all that it started, and an error, beyond the bound."""
        while time.monotonic() - self.begin_s < bound_s:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError(f"a run did not end within {bound_s:.0f} s, see {self.log}")

    def output(self) -> str:
        return self.log.read_text()


def train(words: Sequence[object], log: Path, patch: Patch = lambda: None) -> Command:
    """Run to the end; it must end with 0."""
    command = Command(words, log, patch)
    code = command.wait()
    assert code == 0, f"exit code {code}:\n{command.output()}"
    return command


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def curve(run_dir: Path) -> list[list[Any]]:
    return [[line[name] for name in SAME] for line in metrics(run_dir)]


def preload() -> None:
    """Import what the runs need, once for all of them; nothing is computed, so that forks are safe."""
    import torch
    import transformers.models.llama.modeling_llama

    import bytescale.cli.train
    import bytescale.train.trainer

    assert torch is not None and transformers is not None and bytescale is not None
