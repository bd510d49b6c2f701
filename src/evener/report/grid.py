"""The one look of all tables. Cells are plain text: what a user named is never read as markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

Row = Sequence[str] | None
"""The cells of a row; None for a line between rows."""


def grid(title: str, columns: Sequence[str], rows: Iterable[Row], caption: str = "") -> Table:
    """A table of plain text.

    Args:
        title: above it.
        columns: headers; one that starts with `>` is of numbers, aligned right. Only the first and the last may wrap.
        rows: cells, as many as columns.
        caption: below it.
    """
    table = Table(
        title=Text(title, style="bold"),
        title_justify="left",
        caption=Text(caption, style="dim") if caption else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for i, column in enumerate(columns):
        header, numeric = column.removeprefix(">"), column.startswith(">")
        fixed = numeric or 0 < i < len(columns) - 1
        table.add_column(Text(header), justify="right" if numeric else "left", overflow="fold", no_wrap=fixed)
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*(Text(cell) for cell in row))
    return table
