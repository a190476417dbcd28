"""`bytescale train CONFIG [--nproc N] [--section.key value ...]`.

The same command serves one process, `--nproc N` local ranks (started through torch's elastic launcher) and torchrun on
several nodes. Whatever can be checked before ranks exist is checked here, once: configuration, world size, data, model.
torch is imported only after the configuration is known to be sound.
"""

import os
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bytescale.config.schema import Config
from bytescale.config.toml import load_config, parse_overrides
from bytescale.errors import RunError, UserError
from bytescale.files import shown
from bytescale.launch import describe, is_launched_rank, launch, prepare_launched_rank
from bytescale.report import read_summary, summary_table, write_report


@click.command(
    "train",
    context_settings={"ignore_unknown_options": True},
    options_metavar="CONFIG [--nproc N] [--section.key value ...]",
)
@click.option("--nproc", type=int, help="Number of local ranks; without it one process trains.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="")
def train(nproc: int | None, arguments: tuple[str, ...]) -> int:
    """Train a model as the TOML file CONFIG says.

    Any configuration key can be overridden: --train.steps 20, --plan.tokens-per-rank=4096, --model.config.hidden_size
    64. Under torchrun, call it as `torchrun ... -m bytescale train CONFIG`.
    """
    overrides, rest = parse_overrides(arguments, ("--nproc",))
    if len(rest) != 1:
        raise UserError(f"one configuration file is needed, {len(rest)} are given" + "".join(f" {w}" for w in rest[:3]))
    config = load_config(Path(rest[0]), overrides)
    if is_launched_rank():
        prepare_launched_rank()
        _trainer().run(config)
        return _finish(config)
    world_size = _world_size(nproc)
    check_world_size(config, world_size)
    trainer = _trainer()
    trainer.check(config, world_size)
    if nproc is None or nproc == 1:
        trainer.run(config)
        return _finish(config)
    command = ["-m", "bytescale", "train", *arguments]
    failure = launch(nproc, command, run_dir=Path(config.run.dir), compute_threads=config.train.compute_threads)
    if failure is None:
        return 0
    if failure.traceback:
        click.echo(failure.traceback.rstrip(), err=True)
    click.echo(f"bytescale: {describe(failure)}", err=True)
    return 2 if failure.kind == "user" else 1


def _world_size(nproc: int | None) -> int:
    """Ranks of this run: --nproc, else what torchrun says, else 1."""
    if nproc is not None and nproc < 1:
        raise UserError(f"--nproc {nproc}: at least 1 rank is needed")
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return nproc or 1
    if nproc is not None:
        raise UserError("--nproc starts local ranks itself; under torchrun leave it out")
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise UserError(f"RANK = {rank} and WORLD_SIZE = {size} are not what torchrun sets; unset them to start alone")
    return int(size)


def check_world_size(config: Config, world_size: int) -> None:
    """Whether the mesh of `config` fits `world_size` ranks.

    Raises:
        UserError: it does not; says what would.
    """
    pp, tp, hdp = config.parallel.pp_size, config.parallel.tp_size, config.parallel.hdp_size
    if hdp is not None and pp * tp * hdp != world_size:
        raise UserError(
            f"pp_size * tp_size * hdp_size = {pp} * {tp} * {hdp} = {pp * tp * hdp}, but the world has {world_size} "
            f"rank{'s' * (world_size != 1)}: start {pp * tp * hdp} (--nproc {pp * tp * hdp}) or change [parallel]"
        )
    if world_size % (pp * tp):
        raise UserError(
            f"a world of {world_size} rank{'s' * (world_size != 1)} cannot be cut into pp_size * tp_size = "
            f"{pp} * {tp}: start a multiple of {pp * tp}"
        )


def _trainer() -> Any:
    """The trainer, imported late because it brings torch."""
    try:
        from bytescale.train import trainer
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("bytescale"):
            raise
        raise UserError(f"training needs {error.name}: pip install 'bytescale[train]'") from None
    return trainer


def _finish(config: Config) -> int:
    """On rank 0: print the closing table and write the report of the run."""
    if os.environ.get("RANK", "0") == "0":
        run_dir = Path(config.run.dir)
        Console(highlight=False).print(summary_table(read_summary(run_dir / "summary.json")))
        try:
            click.echo(f"report: {shown(write_report(run_dir))}")
        except OSError as error:
            raise RunError(f"cannot write {run_dir / 'report.html'}: {error.strerror}") from error
    return 0
