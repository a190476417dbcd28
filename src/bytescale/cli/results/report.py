"""`bytescale report RUN_DIR`: the report of a run as one HTML file that needs no network."""

from pathlib import Path

import click

from bytescale.cli.paths import UserPath
from bytescale.report import write_report


@click.command("report")
@click.argument("run_dir", type=UserPath())
def report(run_dir: Path) -> None:
    """Write RUN_DIR/report.html from the metrics, the configuration and the trace that the run left there."""
    click.echo(f"{write_report(run_dir)}")
