"""NfNN's experiment as text, CSV and figure, beside the published tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from evener.atomic import atomic_write
from evener.experiments.results import can_draw, write_csv
from evener.report.text import grid
from evener.schema import Part

MODES = ("sync", "async")

# What the authors measured in a data centre, by (mode, workers).

PUBLISHED_SECONDS = {
    ("sync", 1): 230.0,
    ("sync", 2): 230.0,
    ("sync", 3): 230.0,
    ("async", 1): 229.0,
    ("async", 2): 114.0,
    ("async", 3): 74.0,
}
"""Of 5000 updates."""

PUBLISHED_ACCURACY = {
    ("sync", 1): 0.8369,
    ("sync", 2): 0.8711,
    ("sync", 3): 0.8850,
    ("async", 1): 0.8369,
    ("async", 2): 0.8361,
    ("async", 3): 0.8380,
}
"""On the validation data, after 5000 updates."""

PUBLISHED_BYTES = 509_000_000
"""Each way and worker in 5000 updates of its own: 25 450 parameters of 4 bytes."""

PUBLISHED_UPDATES = 5000


class NfnnCell(Part, frozen=True, kw_only=True):
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


def show(cells: Sequence[NfnnCell], console: Console, output: Path) -> None:
    """Print both tables; write `nfnn.csv` and, where matplotlib is installed, `nfnn.png` into `output`."""
    write_csv([as_row(cell) for cell in cells], output / "nfnn.csv")
    for table in tables(cells):
        console.print(table)
    written = "nfnn.csv"
    if can_draw():
        _draw(cells, output / "nfnn.png")
        written += " and nfnn.png"
    else:
        console.print("there is no figure, which needs matplotlib: pip install 'evener[report]'")
    console.print(f"wrote {written} into {output}")


def tables(cells: Sequence[NfnnCell]) -> Iterator[Table]:
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


def _seconds_row(cell: NfnnCell) -> tuple[str, ...]:
    known = PUBLISHED_SECONDS.get((cell.mode, cell.workers))
    ours = cell.seconds * PUBLISHED_UPDATES / cell.updates
    return (
        cell.mode,
        str(cell.workers),
        f"{cell.seconds:.2f}",
        _plus_minus(cell.seconds_interval),
        f"{cell.updates_per_second:,.0f}",
        "-" if known is None else f"{known:.0f}",
        "-" if known is None else f"{known / ours:.0f}",
    )


def _accuracy_row(cell: NfnnCell) -> tuple[str, ...]:
    known = PUBLISHED_ACCURACY.get((cell.mode, cell.workers)) if cell.updates == PUBLISHED_UPDATES else None
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
        f"{PUBLISHED_BYTES * of_all * cell.updates / PUBLISHED_UPDATES / 1e6:,.1f}",
    )


def _plus_minus(interval: float | None, scale: int = 1) -> str:
    return "-" if interval is None else f"±{scale * interval:.2f}"


def line(cell: NfnnCell) -> str:
    """What is said when a cell is done."""
    who = "1 worker" if cell.workers == 1 else f"{cell.workers} workers"
    speed = f"{cell.seconds:.2f} s, {cell.updates_per_second:,.0f} updates/s"
    return f"{cell.mode}, {who}: {speed}, accuracy {cell.accuracy:.2%}"


def as_row(cell: NfnnCell) -> dict[str, object]:
    """A cell by the names of its fields."""
    return {field: getattr(cell, field) for field in NfnnCell.__struct_fields__}


def _draw(cells: Sequence[NfnnCell], path: Path) -> None:
    """Seconds and accuracy by workers, ours and published."""
    from evener.report.canvas import canvas, png

    with canvas(9, 3.6, "NfNN's experiment") as figure:
        left, right = figure.subplots(1, 2)
        for mode in MODES:
            ours = [cell for cell in cells if cell.mode == mode]
            if not ours:
                continue
            counts = [cell.workers for cell in ours]
            left.plot(counts, [cell.seconds * PUBLISHED_UPDATES / cell.updates for cell in ours], "o-", label=mode)
            right.plot(counts, [100 * cell.accuracy for cell in ours], "o-", label=mode)
            known = [count for count in counts if (mode, count) in PUBLISHED_SECONDS]
            left.plot(known, [PUBLISHED_SECONDS[mode, count] for count in known], "x--", label=f"{mode}, published")
            right.plot(
                known, [100 * PUBLISHED_ACCURACY[mode, count] for count in known], "x--", label=f"{mode}, published"
            )
        left.set(xlabel="workers", ylabel="seconds for 5000 updates", yscale="log")
        right.set(xlabel="workers", ylabel="accuracy, %")
        left.legend()
        atomic_write(path, png(figure))
