"""One run over many layouts, against one process: every step's loss, and every token counted on the ranks.

    python -m benchmarks.resuming.elastic [--json]

The run is moved through CHAIN, a few steps each, from checkpoint to checkpoint: other numbers of ranks, pipelines,
strategies, capacities, offloading. Ranks report the pieces that they compute; the sum must be the data, each token of
an epoch once, in the batches that one process draws.
"""

import argparse
import json
import os
import signal
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import hardware
from benchmarks.resuming.runs import metrics, preload, train, write_run

STEPS = 40
CHAIN: list[tuple[int, tuple[object, ...]]] = [
    (4, ("--nproc", 4, "--plan.strategy", "hdp-balance")),
    (8, ("--nproc", 3, "--plan.strategy", "best")),
    (12, ("--nproc", 1)),
    (16, ("--nproc", 6, "--plan.strategy", "hdp-naive", "--plan.tokens_per_rank", 100)),
    (20, ("--nproc", 4, "--parallel.pp_size", 2, "--plan.strategy", "hdp-balance")),
    (24, ("--nproc", 4, "--parallel.pp_size", 4, "--plan.strategy", "best")),
    (28, ("--nproc", 3, "--parallel.pp_size", 3, "--plan.strategy", "chunked")),
    (32, ("--nproc", 2, "--plan.offload", 1.0, "--offload.min_bytes", 1)),
    (34, ("--nproc", 4, "--parallel.shard_size", 2, "--plan.offload", "off")),
    (36, ("--nproc", 4, "--parallel.tp_size", 2)),
    (40, ("--nproc", 2, "--parallel.pp_size", 2, "--plan.strategy", "chunked", "--checkpoint.async", "false")),
]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", action="store_true")
    as_json = arguments.parse_args().json
    preload()
    with tempfile.TemporaryDirectory() as name:
        result = run(Path(name))
    print(json.dumps(result) if as_json else result)
    raise SystemExit(not result["good"])


def run(directory: Path) -> dict[str, Any]:
    """Both runs, compared."""
    config = write_run(directory, layers=4, save_model=False, num_documents=160)
    common = ("--checkpoint.every", 4, "--train.steps", STEPS)
    train(
        [config, "--run.dir", directory / "alone", "--train.steps", STEPS],
        directory / "alone.log",
        partial(report, directory / "alone.pieces"),
    )
    for end, options in CHAIN:
        words = [config, *common, *options, "--run.dir", directory / "moved", "--resume", "auto"]
        # The schedule is that of the whole run, so each part is ended by a signal rather than by its steps.
        train(words, directory / f"{end}.log", partial(signal_in, end, directory / f"{end}.pieces"))
    alone, moved = metrics(directory / "alone"), metrics(directory / "moved")
    pairs = list(zip(alone, moved, strict=True))
    differences = [abs(b["loss"] - a["loss"]) / a["loss"] for a, b in pairs]
    same_batches = all((a["tokens"], a["sequences"]) == (b["tokens"], b["sequences"]) for a, b in pairs)
    expected = pieces([directory / "alone.pieces"])
    counted = pieces([directory / f"{end}.pieces" for end, _ in CHAIN])
    epochs = epochs_of(directory / "alone.pieces")
    return {
        "steps": len(moved),
        "restarts": moved[-1]["restarts"],
        "largest_loss_difference": max(differences),
        "same_batches": same_batches,
        "same_tokens": counted == expected,
        "epochs": epochs,
        "hardware": hardware(),
        "good": max(differences) <= 1e-5 and same_batches and counted == expected,
    }


def report(path: Path) -> None:
    """Patch this process: the first stage's ranks add the tokens that they compute to `path`, a line for each step."""
    from bytescale.train import trainer

    run_step = trainer.run_step

    def reported(model: Any, kernel: Any, world: Any, data: Any, *rest: Any) -> Any:
        result = run_step(model, kernel, world, data, *rest)
        if world.is_first and world.tp_rank == 0:
            line = json.dumps([data.step, computed(data)]) + "\n"
            with open(path, "a") as file:
                file.write(line)
        return result

    trainer.run_step = reported  # type: ignore[assignment]


def computed(data: Any) -> list[list[int]]:
    """(place in the batch, sequence of the data, position of a token) of all tokens of a rank's step."""
    found = []
    for part, tokens in zip(data.share, data.micro_batches, strict=True):
        places = np.repeat(part.sequences, part.tokens)
        ids = data.batch.sequence_ids[places]
        found += np.stack([places, ids, tokens.position_ids], axis=1).tolist()
    return found


def signal_in(step: int, path: Path | None = None) -> None:
    """Patch this process: a scheduler's signal comes in that step; with `path` ranks report as well."""
    from bytescale.train import trainer

    if path is not None:
        report(path)
    run_step = trainer.run_step

    def signalled(*args: Any) -> Any:
        if args[3].step == step and os.environ.get("RANK", "0") == "0":
            os.kill(os.getpid(), signal.SIGUSR1)
        return run_step(*args)

    trainer.run_step = signalled  # type: ignore[assignment]


def pieces(paths: list[Path]) -> Counter[tuple[int, ...]]:
    """How often each (step, place, sequence, position) was computed; once everywhere, or it is wrong."""
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return Counter((step, *token) for step, tokens in lines for token in tokens)


def epochs_of(path: Path) -> dict[str, Any]:
    """How often each token of the data was computed: the same number for all, up to the epoch that is under way."""
    counts = Counter((sequence, position) for _, _, sequence, position in pieces([path]).elements())
    return {"tokens": len(counts), "least": min(counts.values()), "most": max(counts.values())}


if __name__ == "__main__":
    main()
