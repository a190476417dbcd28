"""From the command to the end of a one-step run: CPU seconds and wall time of two source trees, side by side.

    python -m benchmarks.startup OLD NEW [--rounds 3] [--nproc 1 4]

OLD and NEW are checkouts with a `.venv` of their own. Rounds alternate between them, so that a change of the machine's
load meets both; the least of the rounds counts. CPU seconds are those of the whole process tree (`RUSAGE_CHILDREN`): a
process that is not waited for by its parent is missed, and none is here.
"""

import argparse
import json
import os
import resource
import subprocess
import tempfile
import time
from pathlib import Path

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
path = "{directory}/corpus.jsonl"
cache_dir = "{directory}/cache"
max_context = 512

[batch]
tokens = 2048

[plan]
tokens_per_rank = 512

[train]
steps = 1
compute_threads = 1
"""


def one_run(tree: Path, config: Path, nproc: int) -> tuple[float, float]:
    """CPU and wall seconds of one run in `tree`."""
    with tempfile.TemporaryDirectory() as run_dir:
        command = [
            tree / ".venv/bin/python",
            "-m",
            "bytescale",
            "train",
            config,
            "--nproc",
            nproc,
            "--run.dir",
            run_dir,
        ]
        begin, begin_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment(tree))
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{tree}: {done.stderr}")
    return end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime, time.perf_counter() - begin_s


def environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trees", type=Path, nargs=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nproc", type=int, nargs="+", default=[1, 4])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        texts = [json.dumps({"text": "a line of text, " * (1 + number % 30)}) for number in range(300)]
        Path(directory, "corpus.jsonl").write_text("\n".join(texts))
        config = Path(directory, "run.toml")
        config.write_text(CONFIG.format(directory=directory))
        print("| ranks | old CPU s | new CPU s | new / old | old wall s | new wall s |")
        print("| --- " * 6 + "|")
        for nproc in options.nproc:
            times = [[one_run(tree, config, nproc) for tree in options.trees] for _ in range(options.rounds + 1)][1:]
            old, new = ([min(column) for column in zip(*runs, strict=True)] for runs in zip(*times, strict=True))
            figures = [f"{old[0]:.1f}", f"{new[0]:.1f}", f"{new[0] / old[0]:.2f}", f"{old[1]:.1f}", f"{new[1]:.1f}"]
            print(f"| {nproc} | " + " | ".join(figures) + " |", flush=True)


if __name__ == "__main__":
    main()
