"""NfNN's experiment as text, CSV and figure, beside the published tables."""

from __future__ import annotations

import csv
import importlib.util
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from evener.atomic import atomic_write
from evener.experiments import published
from evener.report.grid import grid
from evener.schema import Part

MODES = ("sync", "async")


class Cell(Part, frozen=True, kw_only=True):
    """One mode with one number of workers.

    Attributes:
        mode: sync or async.
        workers: number of them.
        seconds: from the first lease to the last update, mean of the runs.
        seconds_interval: half of its 95 % confidence interval; None for a single run.
        accuracy: on the validation data, mean of the runs.
        accuracy_interval: half of its 95 % confidence interval; None for a single run.
        bytes_sent: gradients of all workers together in a run, mean; what frames them is less than 1 % more.
        bytes_received: weights, likewise.
        updates_per_second: of the common weights.
        updates: of a run.
    """

    mode: str
    workers: int
    seconds: float
    seconds_interval: float | None
    accuracy: float
    accuracy_interval: float | None
    bytes_sent: int
    bytes_received: int
    updates_per_second: float
    updates: int


def show(cells: Sequence[Cell], console: Console, output: Path) -> None:
    """Print both tables; write `nfnn.csv` and, where matplotlib is installed, `nfnn.png` into `output`."""
    output.mkdir(parents=True, exist_ok=True)
    atomic_write(output / "nfnn.csv", _csv(cells).encode())
    for table in tables(cells):
        console.print(table)
    written = "nfnn.csv"
    if importlib.util.find_spec("matplotlib") is not None:
        _draw(cells, output / "nfnn.png")
        written += " and nfnn.png"
    else:
        console.print("there is no figure, which needs matplotlib: pip install 'evener[report]'")
    console.print(f"wrote {written} into {output}")


def tables(cells: Sequence[Cell]) -> Iterator[Table]:
    """Seconds, then accuracy and traffic, beside the published ones."""
    heads = ("mode", ">workers", ">seconds", ">95 %", ">updates/s", ">published s", ">times faster")
    yield grid("Seconds", heads, [_seconds_row(cell) for cell in cells], "published: 5000 updates in a data centre")
    columns = (
        "mode",
        ">workers",
        ">accuracy",
        ">95 %",
        ">published",
        ">points",
        ">MB sent",
        ">MB received",
        ">MB published",
    )
    yield grid("Accuracy and traffic, all workers together", columns, [_accuracy_row(cell) for cell in cells])


def _seconds_row(cell: Cell) -> tuple[str, ...]:
    known = published.SECONDS.get((cell.mode, cell.workers))
    ours = cell.seconds * published.UPDATES / cell.updates
    return (
        cell.mode,
        str(cell.workers),
        f"{cell.seconds:.2f}",
        _plus_minus(cell.seconds_interval),
        f"{cell.updates_per_second:,.0f}",
        "-" if known is None else f"{known:.0f}",
        "-" if known is None else f"{known / ours:.0f}",
    )


def _accuracy_row(cell: Cell) -> tuple[str, ...]:
    known = published.ACCURACY.get((cell.mode, cell.workers)) if cell.updates == published.UPDATES else None
    of_all = cell.workers if cell.mode == "sync" else 1
    return (
        cell.mode,
        str(cell.workers),
        f"{cell.accuracy:.2%}",
        _plus_minus(cell.accuracy_interval, 100),
        "-" if known is None else f"{known:.2%}",
        "-" if known is None else f"{100 * (cell.accuracy - known):+.2f}",
        f"{cell.bytes_sent / 1e6:,.1f}",
        f"{cell.bytes_received / 1e6:,.1f}",
        f"{published.BYTES * of_all * cell.updates / published.UPDATES / 1e6:,.1f}",
    )


def _plus_minus(interval: float | None, scale: int = 1) -> str:
    return "-" if interval is None else f"±{scale * interval:.2f}"


def line(cell: Cell) -> str:
    """What is said when a cell is done."""
    who = "1 worker" if cell.workers == 1 else f"{cell.workers} workers"
    speed = f"{cell.seconds:.2f} s, {cell.updates_per_second:,.0f} updates/s"
    return f"{cell.mode}, {who}: {speed}, accuracy {cell.accuracy:.2%}"


def words(cell: Cell) -> dict[str, object]:
    """A cell by the names of its fields."""
    return {field: getattr(cell, field) for field in Cell.__struct_fields__}


def _csv(cells: Sequence[Cell]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, Cell.__struct_fields__, lineterminator="\n")
    writer.writeheader()
    writer.writerows(words(cell) for cell in cells)
    return text.getvalue()


def _draw(cells: Sequence[Cell], path: Path) -> None:
    """Seconds and accuracy by workers, ours and published."""
    from evener.report.canvas import canvas, png

    with canvas(9, 3.6, "NfNN's experiment") as figure:
        left, right = figure.subplots(1, 2)
        for mode in MODES:
            ours = [cell for cell in cells if cell.mode == mode]
            if not ours:
                continue
            counts = [cell.workers for cell in ours]
            left.plot(counts, [cell.seconds * published.UPDATES / cell.updates for cell in ours], "o-", label=mode)
            right.plot(counts, [100 * cell.accuracy for cell in ours], "o-", label=mode)
            known = [count for count in counts if (mode, count) in published.SECONDS]
            left.plot(known, [published.SECONDS[mode, count] for count in known], "x--", label=f"{mode}, published")
            right.plot(
                known, [100 * published.ACCURACY[mode, count] for count in known], "x--", label=f"{mode}, published"
            )
        left.set(xlabel="workers", ylabel="seconds for 5000 updates", yscale="log")
        right.set(xlabel="workers", ylabel="accuracy, %")
        left.legend()
        atomic_write(path, png(figure))
