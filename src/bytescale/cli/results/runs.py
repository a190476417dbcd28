"""`bytescale runs DIR`: the runs below a directory, how far they came, and whether they can go on."""

import json
import time
from dataclasses import asdict
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table

from bytescale.cli.paths import UserPath
from bytescale.cli.results.run_list import RunState, find_runs


@click.command("runs")
@click.argument("directory", type=UserPath(), metavar="DIR")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value and nothing else.")
def runs(directory: Path, as_json: bool) -> None:
    """List the runs in DIR and below it.

    A run is running, finished, stopped by a signal or failed; of one that another machine began and that has not ended
    the state is unknown here.
    """
    found = find_runs(directory)
    if as_json:
        click.echo(json.dumps([asdict(run) for run in found]))
        return
    if not found:
        click.echo(f"no run in {directory} or below it")
        return
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("run", "state", "step", "loss", "held-out loss", "last written", "checkpoints", "resume from"):
        table.add_column(column, justify="right" if column in ("step", "loss", "held-out loss") else "left")
    for run in found:
        table.add_row(*_row(run))
    console = Console()
    # Paths are there to be copied: a pipe takes lines of any width.
    (console if console.is_terminal else Console(width=120 + max(len(run.dir) for run in found))).print(table)


def _row(run: RunState) -> tuple[str, ...]:
    steps = f"{run.step:,}" if run.steps is None else f"{run.step:,}/{run.steps:,}"
    checkpoints = ", ".join(map(str, run.checkpoints[-3:]))
    if len(run.checkpoints) > 3:
        checkpoints = f"{len(run.checkpoints)}: ..., {checkpoints}"
    return (
        run.dir,
        run.state,
        steps,
        *("-" if loss is None else f"{loss:.4f}" for loss in (run.loss, run.eval_loss)),
        "-" if run.written_at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.written_at)),
        checkpoints or "-",
        "-" if run.resume_step is None else f"step {run.resume_step:,}",
    )
