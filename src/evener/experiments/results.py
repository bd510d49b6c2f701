"""Rows of an experiment as a table and as a CSV file: a row is a dict with the file's columns as keys."""

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
    """A column of a displayed table.

    Attributes:
        head: head of the column, as for `grid`.
        key: key in a row.
        form: format or function that displays a value; None is displayed as `-`.
    """

    head: str
    key: str
    form: str | Callable[[Any], str] = "{}"


def table_of(title: str, columns: Sequence[Column], rows: Sequence[Row], caption: str = "") -> Table:
    """Return a table of some columns of `rows`."""
    cells = [[_cell(row[column.key], column.form) for column in columns] for row in rows]
    return grid(title, [column.head for column in columns], cells, caption)


def _cell(value: Any, form: str | Callable[[Any], str]) -> str:
    if value is None:
        return "-"
    return form.format(value) if isinstance(form, str) else form(value)


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write all columns of `rows`, which all have those of the first; creates the folder."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    atomic_write(path, text.getvalue().encode())


def megabytes(num_bytes: float) -> str:
    """Return bytes as text in MB, for a column whose head has the unit."""
    return f"{num_bytes / 1e6:,.1f}"


def ratio(value: float | None, reference: float | None) -> float | None:
    """Return `value` over `reference`; None where one of them is unknown."""
    return value / reference if value is not None and reference else None
