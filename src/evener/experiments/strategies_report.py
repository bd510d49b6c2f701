"""Text, CSV file and curves of the experiment with strategies, like the published ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import asdict
from rich.console import Console
from rich.table import Table

from evener.experiments.results import Column, Row, megabytes, table_of, write_csv
from evener.records.plan import is_pipeline
from evener.records.schema import Part
from evener.report.canvas import COLORS, LINES, can_draw, canvas, save_png
from evener.report.text import human_seconds
from evener.training.planning import replica_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EPOCH = 100_000
"""The number of training images of Tiny ImageNet."""
_PUBLISHED = (
    "Published, on 1 to 8 GPUs: data scales best; pipelines flatten at 4 to 6 GPUs; filter (`out`) gets slower with "
    "every GPU that is added; hybrid gains a little from 2 to 4."
)


class StrategyCell(Part, frozen=True, kw_only=True):
    """A cell to time; `serial` is one process, `chunks` are the micro-batches of a pipeline, 1 for other strategies."""

    strategy: str
    ranks: int
    batch: int
    chunks: int = 1

    @property
    def rows(self) -> Sequence[Sequence[int]]:
        """The ranks of every replica."""
        if self.strategy in ("serial", "data"):
            return [[rank] for rank in range(self.ranks)]
        return replica_rows(self.strategy, None, self.ranks)


class StepTime(Part, frozen=True, kw_only=True):
    """Median, least and most seconds of a step, and the bytes of the rank that sends most."""

    seconds: float
    fastest: float
    slowest: float
    sent_bytes: int


class StrategyRow(Part, frozen=True, kw_only=True):
    """A cell and its timing; None if it did not fit the memory."""

    cell: StrategyCell
    timing: StepTime | None


def name_of(cell: StrategyCell) -> str:
    """Return the name of the curve that contains a cell."""
    return f"{cell.strategy}, {cell.chunks} chunks" if is_pipeline(cell.strategy) else cell.strategy


def speed_up(row: StrategyRow, rows: Sequence[StrategyRow]) -> float | None:
    """Return the speed-up over one process with the same batch, if both were timed."""
    alone = next((r.timing for r in rows if r.cell.ranks == 1 and r.cell.batch == row.cell.batch), None)
    return alone.seconds / row.timing.seconds if alone and row.timing else None


def as_row(row: StrategyRow, rows: Sequence[StrategyRow]) -> Row:
    """Return a row as a dict: cell, timing, and derived values."""
    timing = {field: getattr(row.timing, field, None) for field in StepTime.__struct_fields__}
    rate = row.cell.batch / row.timing.seconds if row.timing else None
    return {**asdict(row.cell), **timing, "samples_per_second": rate, "speed_up": speed_up(row, rows)}


def line(row: StrategyRow) -> str:
    """Return the line that is printed when a cell is complete."""
    cell = row.cell
    ranks = f"{name_of(cell)}, {cell.ranks} {'rank' if cell.ranks == 1 else 'ranks'}, batch {cell.batch}"
    return f"{ranks}: {row.timing.seconds:.3f} s a step" if row.timing else f"{ranks}: does not fit the memory"


def show(rows: Sequence[StrategyRow], nodes: str, console: Console, output: Path) -> None:
    """Print the table; write `strategies.csv` and, where matplotlib is installed, the curves into `output`."""
    write_csv([as_row(row, rows) for row in rows], output / "strategies.csv")
    console.print(table(rows, nodes))
    _draw(rows, output)
    console.print(f"wrote {output}")


_COLUMNS = (
    Column("strategy", "name"),
    Column(">ranks", "ranks"),
    Column(">batch", "batch"),
    Column(">s a step", "took"),
    Column(">images/s", "samples_per_second", "{:.1f}"),
    Column(">times one process", "speed_up", "{:.2f}"),
    Column(">MB sent", "sent_bytes", megabytes),
)


def table(rows: Sequence[StrategyRow], nodes: str) -> Table:
    """Return the table of all rows."""
    shown = [
        {
            **as_row(row, rows),
            "name": name_of(row.cell),
            "took": f"{row.timing.seconds:.3f}" if row.timing else "does not fit",
        }
        for row in rows
    ]
    return table_of(f"ResNet-152, {nodes}", _COLUMNS, shown, _PUBLISHED)


def _draw(rows: Sequence[StrategyRow], output: Path) -> None:
    """Draw seconds of an epoch by ranks and, for several batches, by batch; do nothing without matplotlib."""
    if not can_draw():
        return
    batches, ranks = (sorted({getattr(row.cell, field) for row in rows}) for field in ("batch", "ranks"))
    _panels([(f"batch {b}", [r for r in rows if r.cell.batch == b]) for b in batches], "ranks", output)
    if len(batches) > 1:
        panels = [(f"{n} ranks", [r for r in rows if r.cell.ranks == n]) for n in ranks if n > 1]
        _panels(panels, "batch", output)


def _panels(panels: Sequence[tuple[str, Sequence[StrategyRow]]], against: str, output: Path) -> None:
    columns = min(len(panels), 3)
    lines = -(-len(panels) // columns)
    with canvas(2.5 + 3.6 * columns, 0.8 + 3.2 * lines, "ResNet-152 on Tiny ImageNet's sizes") as figure:
        subplots = list(figure.subplots(lines, columns, squeeze=False).flat)
        for axes in subplots[len(panels) :]:
            axes.set_axis_off()
        for axes, (title, rows) in zip(subplots, panels, strict=False):
            _curves(axes, rows, against)
            axes.set(title=title, xlabel=against)
        subplots[0].set_ylabel("an epoch of 100 000 images")
        handles, labels = subplots[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center")
        save_png(figure, output / f"strategies-by-{against}.png")


def _curves(axes: Axes, rows: Sequence[StrategyRow], against: str) -> None:
    """Draw one line per strategy; lines by ranks all begin at one process."""
    ticks = sorted({getattr(row.cell, against) for row in rows})
    alone = [row for row in rows if row.cell.ranks == 1]
    names = list(dict.fromkeys(name_of(row.cell) for row in rows if row.cell.ranks > 1))
    for i, name in enumerate(names):
        curve = alone + [row for row in rows if name_of(row.cell) == name]
        at = [ticks.index(getattr(r.cell, against)) for r in curve if r.timing]
        seconds = [r.timing.seconds / r.cell.batch * EPOCH for r in curve if r.timing]
        style = LINES[i // len(COLORS) % len(LINES)]
        axes.plot(at, seconds, f"o{style}", color=COLORS[i % len(COLORS)], label=name)
    axes.set_xticks(range(len(ticks)), [str(tick) for tick in ticks])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: human_seconds(value))
