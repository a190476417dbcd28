"""Rows of a reproduction as tables: on a terminal and as Markdown. Columns that no row fills are left out."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from bytescale.report import units
from bytescale.reproduction.rows import Row

Cells = tuple[list[str], list[list[str]]]
_HIDDEN = frozenset({"step_s_each"})


def row_cells(rows: Sequence[Row], extra: Sequence[str] | None = None) -> Cells:
    """Header and cells as text.

    Args:
        rows: of one figure.
        extra: further columns to show; None shows all that hold numbers or words.
    """
    records = [row.to_dict() for row in rows]
    columns = [c for c in dict.fromkeys(key for record in records for key in record) if c not in ("figure", *_HIDDEN)]
    fixed = ("quantity", "model", "data", "context", "system", "paper", "ours", "ratio")
    shown = [c for c in fixed if c in columns]
    shown += [c for c in columns if c not in fixed and (extra is None or c in extra)]
    if len({record.get("quantity") for record in records}) == 1 and len(records) > 1:
        shown.remove("quantity")
    return [name.replace("_", " ") for name in shown], [[_text(record.get(c)) for c in shown] for record in records]


def _text(value: Any) -> str:
    if value is None or value == {}:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} ({count})" for name, count in value.items())
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if abs(value) < 1e-6:
            return "0"
        return f"{value:,.0f}" if abs(value) >= 1000 else units.significant(value)
    return str(value)


def rows_table(rows: Sequence[Row], title: str) -> Table:
    """For a terminal."""
    header, cells = row_cells(rows)
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for name in header:
        left = name in ("quantity", "model", "data", "context", "system", "note", "main loss", "taken from")
        table.add_column(name, justify="left" if left else "right")
    for row in cells:
        table.add_row(*row)
    return table


def rows_markdown(rows: Sequence[Row], extra: Sequence[str] | None = None) -> str:
    """For a page."""
    header, cells = row_cells(rows, extra)
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in cells]) + "\n"
