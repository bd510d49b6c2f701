"""NfNN's experiment as text, CSV and figure, beside the published tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import asdict
from rich.console import Console
from rich.table import Table

from evener.atomic import atomic_write
from evener.experiments.results import Column, Row, can_draw, megabytes, table_of, write_csv
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


_SECONDS = (
    Column("mode", "mode"),
    Column(">workers", "workers"),
    Column(">seconds", "seconds", "{:.2f}"),
    Column(">95 %", "seconds_interval", "±{:.2f}"),
    Column(">updates/s", "updates_per_second", "{:,.0f}"),
    Column(">published s", "published_seconds", "{:.0f}"),
    Column(">times faster", "times_faster", "{:.0f}"),
)
_ACCURACY = (
    Column("mode", "mode"),
    Column(">workers", "workers"),
    Column(">accuracy", "accuracy", "{:.2%}"),
    Column(">95 %", "accuracy_interval", lambda interval: f"±{100 * interval:.2f}"),
    Column(">published", "published_accuracy", "{:.2%}"),
    Column(">points", "points", "{:+.2f}"),
    Column(">MB sent", "bytes_sent", megabytes),
    Column(">MB received", "bytes_received", megabytes),
    Column(">MB published", "published_bytes", megabytes),
)


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


def tables(cells: Sequence[NfnnCell]) -> tuple[Table, Table]:
    """Seconds, then accuracy and traffic, beside the published ones."""
    rows = [as_row(cell) for cell in cells]
    return (
        table_of("Seconds", _SECONDS, rows, "published: 5000 updates in a data centre"),
        table_of("Accuracy and traffic, all workers together", _ACCURACY, rows),
    )


def as_row(cell: NfnnCell) -> Row:
    """A cell by the names of its fields, and what was published; accuracies are compared after as many updates only."""
    key, part = (cell.mode, cell.workers), cell.updates / PUBLISHED_UPDATES
    seconds = PUBLISHED_SECONDS.get(key)
    accuracy = PUBLISHED_ACCURACY.get(key) if cell.updates == PUBLISHED_UPDATES else None
    return {
        **asdict(cell),
        "published_seconds": seconds,
        "times_faster": None if seconds is None else seconds * part / cell.seconds,
        "published_accuracy": accuracy,
        "points": None if accuracy is None else 100 * (cell.accuracy - accuracy),
        "published_bytes": PUBLISHED_BYTES * (cell.workers if cell.mode == "sync" else 1) * part,
    }


def line(cell: NfnnCell) -> str:
    """What is said when a cell is done."""
    who = "1 worker" if cell.workers == 1 else f"{cell.workers} workers"
    speed = f"{cell.seconds:.2f} s, {cell.updates_per_second:,.0f} updates/s"
    return f"{cell.mode}, {who}: {speed}, accuracy {cell.accuracy:.2%}"


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
