"""`bytescale lengths`: what a source of sequence lengths looks like."""

import json
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich import box
from rich.table import Table

from bytescale.arrays import IntArray
from bytescale.cli.paths import UserPath, at_home
from bytescale.cli.planning import TokenCount, wide_console
from bytescale.errors import UserError, counted
from bytescale.lengths.source import draw, draw_batch, length_source
from bytescale.report import units
from bytescale.report.plan_plot import draw_lengths

_SAMPLE = 1_000_000


@click.command("lengths")
@click.argument("source", required=False)
@click.option("--lengths", "named", help="The same as SOURCE: a file or a named distribution.", metavar="SOURCE")
@click.option("--above", type=TokenCount(), multiple=True, help="Show the share of tokens above this length.")
@click.option("--batch-tokens", type=TokenCount(), help="Draw one batch of this many tokens.")
@click.option("--batch-sequences", type=click.IntRange(min=1), help="Draw this many sequences.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--out", type=UserPath(), help="Write the lengths here as a JSON list.")
@click.option("--plot", type=UserPath(), help="Draw the histogram here (.png, .svg).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value and nothing else.")
def lengths(
    source: str | None,
    named: str | None,
    above: tuple[int, ...],
    batch_tokens: int | None,
    batch_sequences: int | None,
    seed: int,
    out: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Statistics, token shares and histogram of SOURCE.

    Distributions are drawn from: a million sequences, or what a batch option says. Files are taken as they are.
    """
    text = source or named
    if text is None:
        raise UserError("give a file of lengths or a named distribution such as github")
    if batch_tokens is not None and batch_sequences is not None:
        raise UserError("give --batch-tokens or --batch-sequences, not both")
    chosen = length_source(at_home(text))
    rng = np.random.default_rng(seed)
    if batch_tokens is not None or batch_sequences is not None:
        values = draw_batch(chosen, rng, tokens=batch_tokens, sequences=batch_sequences)
    elif chosen.listed is not None:
        values = chosen.listed
    else:
        values = draw(chosen, _SAMPLE, rng)
    figures = length_figures(values, above)
    if out is not None:
        try:
            out.write_text(json.dumps(values.tolist()) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write lengths {out}: {error.strerror}") from None
    if plot is not None:
        draw_lengths(values, chosen.name, plot)
    if as_json:
        click.echo(json.dumps({"source": chosen.name, **figures}))
        return
    _show(chosen.name, figures)


def length_figures(values: IntArray, above: tuple[int, ...] = ()) -> dict[str, Any]:
    """Statistics of a list of lengths, JSON-ready."""
    total = int(values.sum())
    squares = np.sort(values.astype(np.float64) ** 2)[::-1]
    top = max(1, len(values) // 100)
    marks = sorted({*above, 4096, 32768, 131072, 262144})
    upper = np.maximum(9, np.ceil(np.log2(np.maximum(values, 1)))).astype(np.int64)
    count = np.bincount(upper)
    tokens = np.bincount(upper, weights=values)
    return {
        "sequences": len(values),
        "tokens": total,
        "mean": float(values.mean()),
        "min": int(values.min()),
        "p50": float(np.percentile(values, 50)),
        "p99": float(np.percentile(values, 99)),
        "max": int(values.max()),
        "square_share_longest_1_percent": float(squares[:top].sum() / squares.sum()),
        "above": [
            {
                "length": mark,
                "sequence_share": float((values > mark).mean()),
                "token_share": float(values[values > mark].sum() / total),
            }
            for mark in marks
        ],
        "histogram": [
            {"up_to": int(2**e), "sequences": int(count[e]), "token_share": float(tokens[e] / total)}
            for e in range(9, len(count))
        ],
    }


def _show(name: str, f: dict[str, Any]) -> None:
    console = wide_console()
    console.print(
        f"{name}: {counted(f['sequences'], 'sequence')}, {units.count(f['tokens'])} tokens, mean {f['mean']:.0f}, "
        f"p50 {f['p50']:.0f}, p99 {f['p99']:.0f}, max {f['max']}; "
        f"the longest 1 % hold {f['square_share_longest_1_percent']:.0%} of the sum of squares",
        highlight=False,
        soft_wrap=True,
    )
    shares = Table(title="above a length", title_justify="left", box=box.SIMPLE)
    for column in ("length", "sequences", "tokens"):
        shares.add_column(column, justify="right")
    for row in f["above"]:
        shares.add_row(str(row["length"]), f"{row['sequence_share']:.3%}", f"{row['token_share']:.2%}")
    console.print(shares)
    histogram = Table(title="histogram", title_justify="left", box=box.SIMPLE)
    for column in ("up to", "sequences", "tokens"):
        histogram.add_column(column, justify="right")
    histogram.add_column("share of tokens")
    for row in f["histogram"]:
        bar = "#" * round(50 * row["token_share"])
        histogram.add_row(str(row["up_to"]), str(row["sequences"]), f"{row['token_share']:.2%}", bar)
    console.print(histogram)
