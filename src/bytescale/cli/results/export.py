"""`bytescale export RUN_OR_CHECKPOINT DIR`: the model of a checkpoint for other programs."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from bytescale.checkpoint.directory import MANIFEST, find_checkpoints
from bytescale.cli.paths import UserPath
from bytescale.cli.results.run_list import checkpoint_dir
from bytescale.config.schema import DType
from bytescale.errors import UserError, counted
from bytescale.files import shown
from bytescale.report import units


@click.command("export")
@click.argument("source", type=UserPath(), metavar="RUN_OR_CHECKPOINT")
@click.argument("target", type=UserPath(), metavar="DIR")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Type of the weights; default: the run's.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value and nothing else.")
def export(source: Path, target: Path, dtype: DType | None, as_json: bool) -> None:
    """Write the model of a checkpoint to DIR as a Hugging Face checkpoint, with its tokenizer.

    Of a run directory the newest checkpoint is taken. DIR must not exist, or be empty.
    """
    checkpoint = find_source(source)
    if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise UserError(f"{target} exists; give a directory that does not")
    try:
        from bytescale.checkpoint.stored import read_checkpoint
        from bytescale.train.saving.export import export_model
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("bytescale"):
            raise
        raise UserError(f"export needs {error.name}: pip install 'bytescale[train]'") from None
    exported = export_model(read_checkpoint(checkpoint), target, dtype)
    if as_json:
        click.echo(json.dumps({"source": str(checkpoint), "target": str(target), **asdict(exported)}))
        return
    size = f"{counted(exported.num_files, 'file')}, {units.size(exported.num_bytes)}"
    click.echo(f"step {exported.step} of {shown(checkpoint)} -> {shown(target)}: {exported.dtype}, {size}")


def find_source(source: Path) -> Path:
    """The checkpoint that `source` is, or the newest one of the run directory that it is.

    Raises:
        UserError: it is neither.
    """
    if not source.is_dir():
        raise UserError(f"{source} is not a directory" if source.exists() else f"{source} does not exist")
    if (source / MANIFEST).is_file():
        return source
    for directory in (checkpoint_dir(source), source):
        if found := find_checkpoints(directory):
            return found[0]
    if (source / "model" / "config.json").is_file():
        raise UserError(f"{source} holds no checkpoint; the model that it trained is {source / 'model'}")
    raise UserError(f"{source} is no checkpoint and holds none; set checkpoint.every to let a run write some")
