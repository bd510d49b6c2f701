"""Numbers and tables as people read them: three significant digits with a unit, one style for all tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

Row = Sequence[str] | None
"""The cells of a row; None for a line between rows."""
T = TypeVar("T")


class Grid(Table):
    """A table that fits the terminal.

    On a narrow terminal, the table leaves out optional columns, from the right on, and names them.
    If that is not enough, the other columns continue in further blocks, each behind the first column.

    Attributes:
        optional: headers of the columns that may be left out.
    """

    optional: frozenset[str] = frozenset()
    _EDGES, _GAP = 2, 3
    """Characters around the table, and between two columns."""
    _MIN_TEXT_WIDTH = 30
    """Characters that a wrapping column gets at least."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the title, the blocks of columns that fit the console, and the caption."""
        if self.title:
            yield self.title
        shown, left_out = self._select_columns(options.max_width)
        for columns in self._blocks(shown, options.max_width):
            part = Table(box=self.box, pad_edge=False)
            fits = self._EDGES + sum(map(self._needs, columns)) + self._GAP * (len(columns) - 1) <= options.max_width
            part.columns = [
                replace(column, _index=i, no_wrap=column.no_wrap and (fits or i > 0))  # else a long name wraps
                for i, column in enumerate(columns)
            ]
            part.rows = self.rows
            yield part
        if left_out:
            yield Text(f"Left out, as the terminal is narrow: {', '.join(left_out)}.", style="dim")
        if self.caption:
            yield self.caption

    def _select_columns(self, width: int) -> tuple[list[Column], list[str]]:
        """Return the columns that are shown in `width`, and the headers of the others."""
        left_out: list[Column] = []
        for column in reversed(self.columns):
            if self._fit(left_out, width):
                break
            left_out += [column] if str(column.header) in self.optional else []
        for column in left_out[::-1]:
            others = [other for other in left_out if other is not column]
            left_out = others if self._fit(others, width) else left_out
        shown = [column for column in self.columns if all(column is not other for other in left_out)]
        return shown, [str(column.header) for column in left_out[::-1]]

    def _fit(self, without: Sequence[Column], width: int) -> bool:
        """Return whether all columns except `without` fit into `width`."""
        shown = [column for column in self.columns if all(column is not other for other in without)]
        return len(list(self._blocks(shown, width))) == 1

    def _blocks(self, columns: Sequence[Column], width: int) -> Iterator[list[Column]]:
        """Yield `columns` in blocks, each with as many as fit into `width`."""
        first, *others = columns
        alone = self._EDGES + self._needs(first)
        block, used = [first], alone
        for column in others:
            needed = self._GAP + self._needs(column)
            if used + needed > width and len(block) > 1:
                yield block
                block, used = [first], alone
            block.append(column)
            used += needed
        yield block

    def _needs(self, column: Column) -> int:
        longest = max(map(_longest_line, (column.header, *column.cells)))
        return longest if column.no_wrap else min(longest, self._MIN_TEXT_WIDTH)


def _longest_line(cell: RenderableType) -> int:
    return max((cell_len(line) for line in str(cell).splitlines()), default=0)


def grid(title: str, columns: Sequence[str], rows: Iterable[Row], caption: str = "") -> Table:
    """Return a table of plain text.

    Args:
        title: text above the table.
        columns: headers. A header that starts with `>` marks numbers, aligned right. A header that ends with `?` marks
            a column that a narrow terminal leaves out. Only the last column may wrap.
        rows: cells, as many as columns; None draws a line.
        caption: text below the table.
    """
    table = Grid(
        title=Text(title, style="bold"),
        title_justify="left",
        caption=Text(caption, style="dim") if caption else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.optional = frozenset(column.removeprefix(">")[:-1] for column in columns if column.endswith("?"))
    for i, column in enumerate(columns):
        header, numeric = column.removeprefix(">").removesuffix("?"), column.startswith(">")
        fixed = numeric or i < len(columns) - 1
        table.add_column(Text(header), justify="right" if numeric else "left", overflow="fold", no_wrap=fixed)
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*(Text(cell) for cell in row))
    return table


def table_of(title: str, columns: Mapping[str, Callable[[T], str]], items: Iterable[T], caption: str = "") -> Table:
    """Return a table with one row per item.

    `columns` maps each header, as for `grid`, to the function that returns the cell of an item.
    """
    return grid(title, list(columns), [[cell(item) for cell in columns.values()] for item in items], caption)


_BYTES = ("B", "KB", "MB", "GB", "TB", "PB")
_SMALL = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def human_bytes(num_bytes: float) -> str:
    """Format `num_bytes` in decimal units: `999 B`, `1.50 GB`."""
    size, unit = float(num_bytes), _BYTES[0]
    for larger in _BYTES[1:]:
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} B" if unit == "B" else f"{_digits(size)} {unit}"


def human_seconds(seconds: float) -> str:
    """Format `seconds` from microseconds to hours: `41.2 ms`, `2 min 05 s`, `3 h 07 min`."""
    if not math.isfinite(seconds):
        return str(seconds)
    if round(seconds) >= 3600:
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"{hours} h {minutes:02} min"
    if round(seconds, 1) >= 60:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02} s"
    scale, unit = next(
        (step for step in _SMALL if seconds >= step[0] * 0.9995), _SMALL[-1] if seconds > 0 else _SMALL[0]
    )
    return f"{_digits(seconds / scale)} {unit}"


def human_count(count: float) -> str:
    """Format a number with three significant digits and separated thousands: `12,300`, `4.57`."""
    return _digits(count)


def percent(fraction: float) -> str:
    """Format a fraction as a percentage: `0.4 %`, `58 %`."""
    value = 100 * fraction
    return f"{value:.1f} %" if 0 < abs(value) < 9.95 else f"{value:.0f} %"


def exact_percent(fraction: float | None) -> str:
    """Format a fraction as a percentage with two decimals, as accuracies are compared; None becomes `-`."""
    return "-" if fraction is None else f"{100 * fraction:.2f} %"


def ellipsis(text: str, length: int) -> str:
    """Shorten `text` to `length` characters in its middle, since names differ at both ends."""
    if len(text) <= length:
        return text
    head = (length - 1) // 2
    return f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}"


def _digits(value: float) -> str:
    """Format three significant digits, with trailing zeros so that columns of numbers line up."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    before_point = math.floor(math.log10(abs(value) * 1.0005)) + 1
    return f"{value:,.{min(max(3 - before_point, 0), 6)}f}"
