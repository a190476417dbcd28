"""`bytescale data CONFIG`: what a run of a configuration would see of its data."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bytescale.cli.planning import wide_console
from bytescale.config.overrides import parse_overrides
from bytescale.config.tokenizer import check_tokenizer
from bytescale.config.toml import load_config
from bytescale.data import load_tokenizer, open_dataset, repetition_notes
from bytescale.data.preview import Preview, decoded, preview
from bytescale.errors import UserError, counted
from bytescale.report import units

_OPTIONS = ("--batches", "--sequence", "--tokens", "--validation", "--json")


@click.command("data", context_settings={"ignore_unknown_options": True}, options_metavar="CONFIG [OPTIONS]")
@click.option("--batches", type=click.IntRange(min=0), help="Batches to draw; else those of the run, at most 1,000.")
@click.option("--sequence", type=int, help="Which sequence to show; by default the one that the run begins with.")
@click.option("--tokens", type=click.IntRange(min=0), default=200, show_default=True, help="How much of it.")
@click.option("--validation", is_flag=True, help="The documents that data.validation keeps out of training.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value and nothing else.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="")
def data(
    batches: int | None, sequence: int | None, tokens: int, validation: bool, as_json: bool, arguments: tuple[str, ...]
) -> None:
    """Show what a run of the TOML file CONFIG would see of its data.

    Counts, lengths and shares by source, and one sequence in words with its targets. The data is tokenised where it is
    not yet. Any configuration key can be overridden: --data.max_context 4096.
    """
    overrides, rest = parse_overrides(arguments, _OPTIONS)
    if len(rest) != 1:
        raise UserError(f"one configuration file is needed, {len(rest)} are given" + "".join(f" {w}" for w in rest[:3]))
    config = load_config(Path(rest[0]), overrides)
    check_tokenizer(config)
    tokenizer = load_tokenizer(config.data)
    dataset = open_dataset(config.data, tokenizer, "validation" if validation else "train")
    num_batches = min(config.train.steps, 1000) if batches is None else batches
    seen = preview(dataset, config.batch, config.train.seed, num_batches)
    shown = decoded(dataset, tokenizer, seen.first_sequence if sequence is None else sequence, tokens)
    notes = [*dataset.notes, *repetition_notes(dataset, config.batch, config.train.steps)]
    if as_json:
        counts = asdict(dataset.counts) | {"targets": int(dataset.num_targets.sum())}
        click.echo(json.dumps({**asdict(seen), "counts": counts, "sequence": shown, "notes": notes}))
        return
    wide_console().print(_table(seen))
    for source in seen.sources:
        if source.left_out:
            left_out = ", ".join(f"{number:,} {what}" for what, number in source.left_out.items())
            click.echo(f"{source.name}: {left_out}")
    for note in notes:
        click.echo(note)
    _show_sequence(shown)


def _table(seen: Preview) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    share = f"share of {counted(seen.batches, 'batch', ',')}"
    columns = ("documents", "sequences", "tokens", "targets", "p50", "p99", "longest", "weight", share, "epochs")
    table.add_column("source")
    for column in columns:
        table.add_column(column, justify="right")
    for source in seen.sources:
        table.add_row(
            source.name,
            *(f"{number:,}" for number in (source.documents, source.sequences)),
            *(units.count(number) for number in (source.tokens, source.targets)),
            *(f"{source.lengths[name]:,}" for name in ("p50", "p99", "max")),
            *(f"{share:.1%}" for share in (source.weight, source.share)),
            f"{source.epochs:.2f}",
        )
    return table


def _show_sequence(shown: dict[str, Any]) -> None:
    length, cut = shown["length"], len(shown["ids"])
    head = f"sequence {shown['sequence']:,} of {shown['source']}: {counted(length, 'token', ',')}, "
    click.echo(f"{head}{shown['targets']:,} of them targets; what is no target stands in [[ ]]")
    text = Text()
    for part in shown["parts"]:
        text.append(part["text"] if part["is_target"] else f"[[{part['text']}]]", "" if part["is_target"] else "dim")
    Console(highlight=False, soft_wrap=True).print(text)
    if cut < length:
        click.echo(f"... and {counted(length - cut, 'token', ',')} more")
