"""`bytescale reproduce [FIGURE]`: the published figures beside ours, as tables, CSV, pictures and the page of the docs.

Everything is seeded: the same version gives the
same numbers.
"""

import csv
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

import click
from rich.console import Console

from bytescale.cli.paths import UserPath
from bytescale.cli.planning import wide_console
from bytescale.errors import UserError, nearest
from bytescale.files import write_text_atomically
from bytescale.reproduction.catalogue import FIGURES, Request
from bytescale.reproduction.page.document import reproduction_page
from bytescale.reproduction.page.plots import draw_figure, has_picture
from bytescale.reproduction.page.tables import rows_table
from bytescale.reproduction.rows import Row
from bytescale.reproduction.store import keep_rows, kept_rows
from bytescale.reproduction.systems import NUM_BATCHES


@click.command("reproduce")
@click.argument("figure", default="all", metavar="[FIGURE]")
@click.option("--batches", "num_batches", type=click.IntRange(min=1), default=NUM_BATCHES, show_default=True)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=lambda: os.cpu_count() or 1,
    show_default="one a core",
    help="Processes that compute cells of a figure side by side.",
)
@click.option("--out", type=UserPath(), help="Directory for CSV files and pictures.")
@click.option("--page", type=UserPath(), help="Write the page of tables and pictures here (Markdown).")
@click.option(
    "--keep", type=UserPath(), help="Keep computed rows here; take those that this very code computed before."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list of rows and nothing else.")
def reproduce(
    figure: str, num_batches: int, jobs: int, out: Path | None, page: Path | None, keep: Path | None, as_json: bool
) -> None:
    """Compute a published figure and print ours, the paper's and the ratio.

    FIGURE is one of fig4 to fig6, fig12, fig13, fig16 to fig18, fig18b, fig19 to fig21, holdout, offload, labels,
    beyond and scaling, or all (default). All of them take many minutes with 20 batches a cell; holdout and beyond some
    minutes each, the small ones seconds.
    """
    if figure != "all" and figure not in FIGURES:
        raise UserError(f"unknown figure {figure!r}; {nearest(figure, [*FIGURES, 'all'])}")
    if page is not None and figure != "all":
        raise UserError("--page shows all figures: leave FIGURE out")
    names = list(FIGURES) if figure == "all" else [figure]
    rows: dict[str, list[Row]] = {}
    for name in names:
        rows[name] = _rows(name, num_batches, jobs, keep)
        if not as_json:
            wide_console().print(rows_table(rows[name], f"{name}: {FIGURES[name].title}"))
    pictures = out if out is not None else (page.parent / "images" if page is not None else None)
    for name in names:
        if out is not None:
            _write_csv(rows[name], out / f"{name}.csv")
        if pictures is not None and has_picture(name, rows[name]):
            draw_figure(name, rows[name], pictures / f"reproduce-{name}.svg")
    if page is not None:
        write_text_atomically(page, reproduction_page(rows, num_batches))
    if as_json:
        click.echo(json.dumps([row.to_dict() for name in names for row in rows[name]]))
        return
    where, cluster = resources.files("bytescale.reproduction"), resources.files("bytescale.resources")
    constants = f"{cluster / 'paper_cluster.toml'}, {where / 'calibration.toml'}"
    click.echo(f"constants: {constants}; published figures: {where / 'published.toml'}")


def _rows(name: str, num_batches: int, jobs: int, keep: Path | None) -> list[Row]:
    """The rows of a figure, kept or computed."""
    if keep is not None and (kept := kept_rows(keep, name, num_batches)) is not None:
        return kept
    with _progress(f"{name}: {FIGURES[name].title}") as progress:
        rows = FIGURES[name].rows(Request(num_batches, progress, jobs))
    if keep is not None:
        keep_rows(keep, name, num_batches, rows)
    return rows


@contextmanager
def _progress(title: str) -> Iterator[Callable[[str], None]]:
    """Says on standard error what is computed: one line that changes on a terminal, plain lines anywhere else."""
    if sys.stderr.isatty():
        with Console(stderr=True).status(title) as status:
            yield status.update
    else:
        click.echo(title, err=True)
        yield lambda text: click.echo(text, err=True)


def _write_csv(rows: list[Row], path: Path) -> None:
    """All columns any row has, in order of first appearance; cells that hold lists or tables are JSON."""
    records = [row.to_dict() for row in rows]
    columns = list(dict.fromkeys(key for record in records for key in record))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            for record in records:
                plain = {k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in record.items()}
                writer.writerow(plain)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
