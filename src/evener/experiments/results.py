"""Rows of an experiment as a table and as a file: a row is a dict, whose columns are those of the CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from evener.records.atomic import atomic_write
from evener.report.text import grid

Row = Mapping[str, Any]


class Column(NamedTuple):
    """A column of a table that is shown.

    Attributes:
        head: of the column, as for `grid`.
        key: of a row.
        form: how a value is shown, as a format or a function; None is shown as `-`.
    """

    head: str
    key: str
    form: str | Callable[[Any], str] = "{}"


def table_of(title: str, columns: Sequence[Column], rows: Sequence[Row], caption: str = "") -> Table:
    """Some columns of `rows`."""
    cells = [[_cell(row[column.key], column.form) for column in columns] for row in rows]
    return grid(title, [column.head for column in columns], cells, caption)


def _cell(value: Any, form: str | Callable[[Any], str]) -> str:
    if value is None:
        return "-"
    return form.format(value) if isinstance(form, str) else form(value)


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write all columns of `rows`, which all have those of the first; makes the folder."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    atomic_write(path, text.getvalue().encode())


def megabytes(num_bytes: float) -> str:
    """Bytes in MB, for a column whose head says so."""
    return f"{num_bytes / 1e6:,.1f}"


def ratio(value: float | None, reference: float | None) -> float | None:
    """`value` over `reference`; None where one of them is not known."""
    return value / reference if value is not None and reference else None
