"""`evener experiment nfnn`: NfNN's experiment (A10) on Evener's parameter server, beside the published figures.

    for workers in 1, 2, 3:
        a master and that many thin nodes, each a process with one thread
        for mode in sync, async; for every repetition:
            5000 updates of a 784-32-10 perceptron on MNIST; seconds, accuracy, bytes

The published server adds the workers' gradients, Evener averages them. To match, the learning rate of a synchronous run
is multiplied by the number of workers.

All runs begin with the weights of one seed, as the published ones did, whose results for one worker agree to the last
digit between the modes. The order of the samples differs in each repetition; accuracy is the mean over them. Weights
matter more than order: with one worker 20 seeds give 79.9 to 83.9 % (mean 82.2 %), 8 orders of one seed 83.6 to 84.2 %.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.table import Table
from safetensors.numpy import load as load_weights

from evener import autodiff as ad
from evener.agreements.settings import AgreementSettings, Sgd, Workload
from evener.commands.private_master import local_cluster
from evener.config.options import PATIENCE
from evener.data.mnist import MNIST_FOLDER
from evener.data.tasks.load import load_thin_task
from evener.data.tasks.thin import NFNN_BATCH, NFNN_RATE
from evener.experiments.options import NfnnConfig, numbers
from evener.experiments.results import Column, Row, megabytes, ratio, table_of, write_csv
from evener.launch.nodes import NodeSpec
from evener.ps.client import MasterClient
from evener.ps.node.thin_backend import ThinBackend
from evener.ps.protocol.job import Job
from evener.records.errors import require
from evener.records.record import TrainRecord
from evener.records.schema import parse_noun
from evener.records.task import ThinTask
from evener.records.version import pip_install
from evener.report.canvas import COLORS, can_draw, canvas, log_axis, save_png
from evener.report.text import human_seconds, percent
from evener.system.signals import interrupt_on_stop_signals
from evener.training.console import open_console, print_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Figures measured by the authors in a data centre, by mode and number of workers.

PUBLISHED_UPDATES = 5000
PUBLISHED_SECONDS = {"sync": {1: 230.0, 2: 230.0, 3: 230.0}, "async": {1: 229.0, 2: 114.0, 3: 74.0}}
PUBLISHED_ACCURACY = {"sync": {1: 0.8369, 2: 0.8711, 3: 0.8850}, "async": {1: 0.8369, 2: 0.8361, 3: 0.8380}}
PUBLISHED_BYTES = 509_000_000
"""Bytes per direction and worker in 5000 updates of its own: 25 450 parameters of 4 bytes."""

_STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Quantile of Student's distribution for the 95 % confidence interval of the mean of a number of values; more use the
last.
"""

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


class NfnnOutcome(NamedTuple):
    """The result of a run: seconds from the first lease to the last update, accuracy, and bytes of all workers
    together.
    """

    seconds: float
    accuracy: float
    bytes_sent: int
    bytes_received: int


def run(config: NfnnConfig, *, as_json: bool) -> list[Row]:
    """Run the experiment and write `nfnn.csv` and, where matplotlib is installed, `nfnn.png`.

    Args:
        config: configuration; the first repetition orders the samples by its seed, the next ones by the seeds after it.
        as_json: whether to print the rows as the last line.

    Raises:
        MissingFile: MNIST is missing; the message says what to download.
    """
    data = (config.data or MNIST_FOLDER).resolve()
    task = load_task(config.data or MNIST_FOLDER)
    num_samples = len(task.train_data()[0])
    require(num_samples >= NFNN_BATCH, "training samples", num_samples, f"at least {NFNN_BATCH}, a batch")
    console = open_console(as_json)
    rows: list[Row] = []
    with interrupt_on_stop_signals():
        for workers in numbers("--workers", config.workers):
            nodes = [NodeSpec(name=f"worker-{number}", threads=1) for number in range(workers)]
            with (
                local_cluster(nodes, PATIENCE, thin=True, data=data, encrypted=config.tls) as cluster,
                MasterClient(cluster.address, cluster.token, PATIENCE) as client,
            ):
                cluster.wait_for_nodes(client)
                for mode in config.modes:
                    orders = range(config.seed, config.seed + config.repeat)
                    jobs = [job_of(task, data, mode, workers, config.updates, order) for order in orders]
                    runs = [outcome_of(task, job, config.seed, client, cluster.require_all_alive) for job in jobs]
                    rows.append(row_of(mode, workers, runs, config.updates))
                    console.print(_line(rows[-1]))
    rows.sort(key=lambda row: (row["mode"] == "async", row["workers"]))
    _show(rows, console, config.output)
    if as_json:
        print_line(json.dumps({"cells": rows}))
    return rows


def load_task(data: Path) -> ThinTask:
    """Return the task, which reads MNIST in folder `data` once. Raises MissingFile."""
    task = load_thin_task("nfnn", data)
    assert task.validation_data is not None
    return replace(task, train_data=cache(task.train_data), validation_data=cache(task.validation_data))


def job_of(task: ThinTask, data: Path, mode: str, workers: int, updates: int, order_seed: int) -> Job:
    """Return a run of `updates` updates of the common weights, on nodes that read MNIST in folder `data`."""
    is_sync = mode == "sync"
    sgd = Sgd(learning_rate=NFNN_RATE * workers if is_sync else NFNN_RATE)
    return Job(
        run=f"nfnn-{mode}-{workers}-{order_seed}",
        task="nfnn",
        title="nfnn",
        data_dir=str(data),
        agreement_name=mode,
        agreement=AgreementSettings(batch=NFNN_BATCH, outer=sgd, staleness=0 if is_sync else None, division="fixed"),
        workload=Workload(num_samples=len(task.train_data()[0]), num_updates=updates, seed=order_seed),
        layout=ThinBackend(task, 0, "fp32").layout,
    )


def outcome_of(
    task: ThinTask, job: Job, weights_seed: int, client: MasterClient, check: Callable[[], None]
) -> NfnnOutcome:
    """Run `job`, calling `check` regularly. Raises EvenerError if it ended early."""
    backend = ThinBackend(task, weights_seed, "fp32")
    client.submit(job, backend.initial_weights(), [])
    result = client.watch(job.run, lambda _: None, check)
    if result.error is not None:
        raise result.error
    record = parse_noun(result.record, TrainRecord, source="the master's record")
    backend.model.load_state_dict(load_weights(bytes(result.weights)))
    return NfnnOutcome(
        seconds=record.seconds,
        accuracy=_accuracy(task, backend.model),
        bytes_sent=sum(node.bytes_sent for node in record.nodes),
        bytes_received=sum(node.bytes_received for node in record.nodes),
    )


def _accuracy(task: ThinTask, model: ad.nn.Module) -> float:
    assert task.validation_data is not None
    images, labels = task.validation_data()
    with ad.no_grad():
        return float((model(ad.from_numpy(images)).numpy().argmax(1) == labels).mean())


def row_of(mode: str, workers: int, runs: Sequence[NfnnOutcome], updates: int) -> Row:
    """Return the means of some runs beside the published figures; accuracies only for equal numbers of updates."""
    seconds, accuracies = [run.seconds for run in runs], [run.accuracy for run in runs]
    part = updates / PUBLISHED_UPDATES
    known = PUBLISHED_SECONDS[mode].get(workers)
    accuracy = PUBLISHED_ACCURACY[mode].get(workers) if part == 1 else None
    return {
        "mode": mode,
        "workers": workers,
        "seconds": mean(seconds),
        "seconds_interval": _interval(seconds),
        "accuracy": mean(accuracies),
        "accuracy_interval": _interval(accuracies),
        "bytes_sent": round(mean(run.bytes_sent for run in runs)),
        "bytes_received": round(mean(run.bytes_received for run in runs)),
        "updates_per_second": updates / mean(seconds),
        "updates": updates,
        "published_seconds": known,
        "times_faster": ratio(known, mean(seconds) / part),
        "published_accuracy": accuracy,
        "points": None if accuracy is None else 100 * (mean(accuracies) - accuracy),
        "published_bytes": PUBLISHED_BYTES * (workers if mode == "sync" else 1) * part,
    }


def _interval(values: Sequence[float]) -> float | None:
    """Return half of the 95 % confidence interval of the mean, by Student's distribution; None for one value."""
    count = len(values)
    return _STUDENT[min(count, max(_STUDENT))] * stdev(values) / sqrt(count) if count > 1 else None


def _line(row: Row) -> str:
    """Return the line that is printed when a row is complete."""
    workers = "1 worker" if row["workers"] == 1 else f"{row['workers']} workers"
    speed = f"{row['seconds']:.2f} s, {row['updates_per_second']:,.0f} updates/s"
    return f"{row['mode']}, {workers}: {speed}, accuracy {row['accuracy']:.2%}"


def _show(rows: Sequence[Row], console: Console, output: Path) -> None:
    write_csv(rows, output / "nfnn.csv")
    for table in tables(rows):
        console.print(table)
    files = "nfnn.csv"
    if can_draw():
        save_png(seconds_and_accuracy(rows), output / "nfnn.png")
        files += " and nfnn.png"
    else:
        console.print(f"no figure was drawn, because matplotlib is missing: {pip_install('report')}")
    console.print(f"wrote {files} into {output}")


def tables(rows: Sequence[Row]) -> tuple[Table, Table]:
    """Return a table of seconds, and one of accuracy and traffic, beside the published figures."""
    seconds = table_of("Seconds", _SECONDS, rows, "published: 5000 updates in a data centre")
    return seconds, table_of("Accuracy and traffic, all workers together", _ACCURACY, rows)


def seconds_and_accuracy(rows: Sequence[Row]) -> Figure:
    """Return a figure of seconds and accuracy by workers, measured and published."""
    counts = sorted({row["workers"] for row in rows})
    with canvas(9.5, 4.0, "NfNN's experiment") as figure:
        left, right = figure.subplots(1, 2)
        for color, mode in zip(COLORS, dict.fromkeys(row["mode"] for row in rows), strict=False):
            ours = [row for row in rows if row["mode"] == mode]
            at = [row["workers"] for row in ours]
            seconds = [row["seconds"] * PUBLISHED_UPDATES / row["updates"] for row in ours]
            left.plot(at, seconds, "o-", color=color, label=mode)
            right.plot(at, [row["accuracy"] for row in ours], "o-", color=color)
            known = [count for count in at if count in PUBLISHED_SECONDS[mode]]
            label = f"{mode}, published"
            left.plot(known, [PUBLISHED_SECONDS[mode][count] for count in known], "x--", color=color, label=label)
            right.plot(known, [PUBLISHED_ACCURACY[mode][count] for count in known], "x--", color=color)
        log_axis(left, "y", 10, (1.0, 2.0, 5.0), human_seconds)
        right.yaxis.set_major_formatter(lambda value, _: percent(value))
        for axes in (left, right):
            axes.set_xlabel("workers")
            axes.set_xticks(counts)
        left.set_title(f"{PUBLISHED_UPDATES} updates")
        right.set_title(f"accuracy (here after {rows[0]['updates']} updates)")
        figure.legend(loc="outside lower center", ncols=4)
    return figure
