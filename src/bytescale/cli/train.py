"""`bytescale train CONFIG [--nproc N] [--dry-run] [--section.key value ...]`.

The same command serves one process, `--nproc N` local ranks (forked from this process, which imports torch for all of
them) and a rank of torchrun on several nodes. Whatever can be checked before ranks exist is checked before, once:
configuration, world size, data, model. torch is imported only after the configuration is known to be sound.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from bytescale.cli.ranks import end_rank, fail, run_ranks, show_failure
from bytescale.config.overrides import Override, parse_overrides
from bytescale.config.schema import Config
from bytescale.config.toml import load_config
from bytescale.errors import RunError, UserError
from bytescale.files import shown
from bytescale.launch import (
    ATTEMPT_VARIABLE,
    RankFailure,
    ignore_input,
    interruptible,
    run_apart,
    run_with_restarts,
    shared_threads,
    torchrun,
)
from bytescale.report import read_summary, summary_table, write_report
from bytescale.report.output import say, say_table
from bytescale.train.checks import check_first
from bytescale.train.resuming.origin import checkpoint_dir

_OPTIONS = ("--nproc", "--restarts", "--min-nproc", "--resume", "--dry-run", "--world")


@click.command(
    "train",
    context_settings={"ignore_unknown_options": True},
    options_metavar="CONFIG [--nproc N [--restarts N [--min-nproc N]]] [--resume auto|PATH|off] "
    "[--dry-run [--world N]] [--section.key value ...]",
)
@click.option("--nproc", type=int, help="Number of local ranks; without it one process trains.")
@click.option("--restarts", type=int, default=0, help="How often to start again after a failure; needs checkpoints.")
@click.option("--min-nproc", type=int, help="With --restarts: one rank fewer each time, down to this number.")
@click.option("--resume", help="auto, a checkpoint or run directory to go on from, or off; checkpoint.resume.")
@click.option("--dry-run", is_flag=True, help="Check everything, show what a run would open with, start nothing.")
@click.option("--world", type=int, help="With --dry-run: number of ranks that the run is to have.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="")
def train(
    nproc: int | None,
    restarts: int,
    min_nproc: int | None,
    resume: str | None,
    dry_run: bool,
    world: int | None,
    arguments: tuple[str, ...],
) -> int:
    """Train a model as the TOML file CONFIG says.

    Any configuration key can be overridden: --train.steps 20, --plan.tokens-per-rank=4096, --model.config.hidden_size
    64. Under torchrun, call it as `torchrun ... -m bytescale train CONFIG`.
    """
    overrides, rest = parse_overrides(arguments, _OPTIONS)
    if resume is not None:
        overrides.append(Override(("checkpoint", "resume"), resume))
    if len(rest) != 1:
        raise UserError(f"one configuration file is needed, {len(rest)} are given" + "".join(f" {w}" for w in rest[:3]))
    config = load_config(Path(rest[0]), overrides)
    _check_world(nproc, dry_run, world)
    world_size = torchrun.world_size(os.environ, nproc)
    _check_restarts(config, nproc, restarts, min_nproc, world_size)
    with interruptible():
        if dry_run:
            return _dry_run(config, world or nproc or world_size or 1)
        if (nproc is None or nproc == 1) and restarts == 0:
            return _train_in_this_process(config, world_size or 1)
        return _train_on_local_ranks(config, nproc or 1, restarts, min_nproc)


def _check_world(nproc: int | None, dry_run: bool, world: int | None) -> None:
    if world is None:
        return
    if not dry_run:
        raise UserError("--world is for --dry-run; --nproc N starts N local ranks")
    if nproc is not None:
        raise UserError(f"--world {world} and --nproc {nproc} both say how many ranks; give one")
    if world < 1:
        raise UserError(f"--world {world}: at least 1 rank is needed")


def _check_restarts(
    config: Config, nproc: int | None, restarts: int, min_nproc: int | None, world_size: int | None
) -> None:
    if restarts < 0:
        raise UserError(f"--restarts {restarts}: it must be at least 0")
    if restarts and world_size is not None:
        raise UserError(
            f"--restarts {restarts} is for local ranks; under torchrun use torchrun --max-restarts {restarts}"
        )
    if restarts and config.checkpoint.every is None:
        raise UserError(f"--restarts {restarts} needs checkpoints to start from; set checkpoint.every, e.g. 500")
    if min_nproc is not None and not (restarts and 1 <= min_nproc <= (nproc or 1)):
        what = "it lies in 1..--nproc" if restarts else "it needs --restarts N"
        raise UserError(f"--min-nproc {min_nproc}: {what}")


def _dry_run(config: Config, world_size: int) -> int:
    """Show what a run of that size would open with, and leave nothing behind."""
    places = [Path(config.run.dir), checkpoint_dir(config)]
    made = sorted({p for place in places for p in (place, *place.parents) if not p.exists()}, reverse=True)
    try:
        check_first(config, world_size)
        for line in _trainer().dry_run(config, world_size):
            click.echo(line)
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()
    click.echo("dry run: all checks passed, nothing was started")
    return 0


def _train_in_this_process(config: Config, world_size: int) -> int:
    """Alone, or as one rank of those that torchrun started."""
    check_first(config, world_size)
    ignore_input()
    trainer = _trainer()
    if world_size == 1:
        trainer.check(config, world_size)
    # Ranks of torchrun prepare, each in its own time, where the others know that they live.
    return end_rank(_run(trainer, config, fail))


def _train_on_local_ranks(config: Config, nproc: int, restarts: int = 0, min_nproc: int | None = None) -> int:
    """As the launcher of `nproc` ranks, which are copies of this process once it has imported what they need."""
    check_first(config, nproc)
    with shared_threads(nproc, config.train.compute_threads):
        trainer = _trainer()
        trainer.preload(config)

        def check(size: int, number: int) -> RankFailure | None:
            """The check tokenises and computes, and so leaves threads behind that a fork would lose."""
            return run_apart(lambda: trainer.check(config, size), {ATTEMPT_VARIABLE: str(number)})

        def attempt(size: int, number: int) -> RankFailure | None:
            return run_ranks(size, lambda: _run(trainer, config), config, {ATTEMPT_VARIABLE: str(number)})

        def next_nproc(size: int, number: int) -> int:
            """The largest smaller number of ranks that is allowed and can work, else the same."""
            smaller = range(size - 1, (size if min_nproc is None else min_nproc) - 1, -1)
            return next((fewer for fewer in smaller if check(fewer, number) is None), size)

        failure = check(nproc, 0) or run_with_restarts(attempt, nproc, restarts, next_nproc)
    return show_failure(failure)


def _run(trainer: Any, config: Config, lost: Callable[[Exception], int] | None = None) -> int:
    """Train as this rank, then on rank 0 print the closing table and write the report of the run.

    Returns:
        0, or 128 + the signal that ended the run early.
    """
    signal_number = trainer.run(config, lost)
    if os.environ.get("RANK", "0") == "0":
        run_dir = Path(config.run.dir)
        say_table(summary_table(read_summary(run_dir / "summary.json")))
        try:
            say(f"report: {shown(write_report(run_dir))}")
        except OSError as error:
            raise RunError(f"cannot write {run_dir / 'report.html'}: {error.strerror}") from error
    return 128 + signal_number if signal_number else 0


def _trainer() -> Any:
    """The trainer, imported late because it brings torch."""
    try:
        from bytescale.train import trainer
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("bytescale"):
            raise
        raise UserError(f"training needs {error.name}: pip install 'bytescale[train]'") from None
    return trainer
