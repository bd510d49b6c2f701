"""`evener experiment scattered-gpus`: one detector on nodes that each have a machine of their own (T9).

    for nodes in alone, two equal ones, two of which one is half as fast:
        the nodes synchronise in every batch; or train alone and are merged after every epoch, in three ways; or DiLoCo
        the single node once more

A machine's speed varies over time, so nodes are compared with the single node right before and right after them. Every
run is a separate command with its record: `evener yolo` where nodes synchronise in every batch, `evener train
--agreement` where a master merges. The published figures are of two equal computers: an epoch took 10 s alone, 7.82 s
merged by six threads, and 6.52 s merged on the accelerator, of which 0.8 s were transfer and 1.4 s loading. The batch
is that of all nodes where they synchronise in every batch, and of each node otherwise; every batch is a step.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from rich.console import Console

from evener.experiments.options import ScatteredConfig
from evener.experiments.results import Column, Row, ratio, table_of, write_csv
from evener.launch.nodes import parse_local_nodes
from evener.records.errors import TrainingFailed
from evener.records.record import RECORD, Step, TrainRecord
from evener.records.schema import read_noun
from evener.records.version import pip_install
from evener.report.canvas import can_draw, canvas, save_png
from evener.report.html import write_page
from evener.system.signals import interrupt_on_stop_signals
from evener.training.console import open_console, print_line

ALONE = "alone"
PUBLISHED = {"average, threads": 7.82 / 10, "average, device": 6.52 / 10}
"""Seconds of an epoch of two equal nodes relative to one node."""
_COLUMNS = (
    Column("nodes", "nodes"),
    Column("way", "way"),
    Column(">take part", "take_part"),
    Column(">s an epoch", "seconds", "{:.2f}"),
    Column(">of ideal", "of_ideal", "{:.0%}"),
    Column(">published", "published_of_ideal", "{:.0%}"),
    Column(">transfer s", "transfer_seconds", "{:.2f}"),
    Column(">loading s", "loading_seconds", "{:.2f}"),
    Column(">mAP50-95", "map", "{:.3f}"),
)


class Method(NamedTuple):
    """A run to time.

    Attributes:
        name: name of the method.
        speeds: speeds of the nodes.
        arguments: additional arguments of `evener train`; empty if the nodes synchronise in every batch.
    """

    name: str
    speeds: str
    arguments: tuple[str, ...]


class TimedRun(NamedTuple):
    """A run that was timed.

    Attributes:
        method: its method.
        record: its record.
        accuracy: mAP50-95 of boxes after its last epoch; None for a task without boxes.
    """

    method: Method
    record: TrainRecord
    accuracy: float | None


def methods_of(config: ScatteredConfig) -> list[Method]:
    """Return the runs in order: the single node first, and again after every set of nodes."""
    average = ("--agreement", "average", "--merge")
    methods = [Method(ALONE, "1", ())]
    for speeds in config.nodes.split(";"):
        methods.append(Method("every batch", speeds, ()))
        methods += [Method(f"average, {merge}", speeds, (*average, merge)) for merge in ("threads", "device", "cores")]
        methods.append(Method("diloco", speeds, ("--agreement", "diloco", "--local-steps", "{an epoch}")))
        methods.append(Method(ALONE, "1", ()))
    return methods


def run(config: ScatteredConfig, *, as_json: bool) -> list[Row]:
    """Run the experiment and write `scattered-gpus.csv`, a page and, where matplotlib is installed, a figure.

    Args:
        config: configuration.
        as_json: whether to print the rows as the last line.

    Raises:
        TrainingFailed: one of the runs failed; the message has the reason.
    """
    console, timed = open_console(as_json), list[TimedRun]()
    for number, method in enumerate(methods_of(config)):
        folder = (config.output / f"{number:02}-{method.name.replace(', ', '-').replace(' ', '-')}").resolve()
        images = samples_of(timed[0].record) if timed else 0
        _perform(command_of(config, method, folder, images), method)
        record = read_noun(folder / RECORD, TrainRecord)
        timed.append(TimedRun(method, record, _map_of(folder / "results.csv")))
        console.print(f"{method.name} on {method.speeds}: {seconds_of(record):.2f} s an epoch")
    rows = rows_of(timed)
    records = {f"{number}. {run.method.name} on {run.method.speeds}": run.record for number, run in enumerate(timed)}
    _show(rows, records, console, config.output)
    if as_json:
        print_line(json.dumps({"cells": rows}))
    return rows


def command_of(config: ScatteredConfig, method: Method, folder: Path, images: int) -> list[str]:
    """Return the arguments of `evener` for a method; DiLoCo exchanges once per epoch of `images` images."""
    share = 1 / sum(node.speed_at(0) for node in parse_local_nodes(method.speeds))
    steps = str(max(1, ceil(images * share / config.batch_size)))
    arguments = [steps if argument == "{an epoch}" else argument for argument in method.arguments]
    settings = [f"imgsz={config.imgsz}", "val=False", "plots=False"]
    settings += [] if method.arguments else [f"nbs={config.batch_size}"]
    return [
        *("train", config.model, "--data", str(config.data), "--epochs", str(config.epochs)),
        *("--batch-size", str(config.batch_size), "--seed", str(config.seed), "--local-nodes", method.speeds, "--json"),
        *("--output", str(folder)),
        *arguments,
        *(argument for setting in settings for argument in ("--option", setting)),
    ]


def _perform(arguments: Sequence[str], method: Method) -> None:
    command = [sys.executable, "-m", "evener", *arguments]
    with interrupt_on_stop_signals():  # these also end the run
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or [f"exit code {result.returncode} without a message"])[-1]
        raise TrainingFailed(f"{method.name} on {method.speeds}: {reason}")


def samples_of(record: TrainRecord) -> int:
    """Return the number of images of an epoch."""
    return sum(step.samples for step in record.steps if step.epoch == record.steps[0].epoch)


def rows_of(timed: Sequence[TimedRun]) -> list[Row]:
    """Return the rows of all runs; nodes are compared with the mean of the single node before and after them."""
    alone = [row_of(run, None) for run in timed if run.method.name == ALONE]
    rows, passed = list[Row](), 0
    for run in timed:
        if run.method.name == ALONE:
            rows.append(alone[passed])
            passed += 1
        else:
            around = mean(row["seconds"] for row in alone[passed - 1 : passed + 1])
            rows.append(row_of(run, {**alone[passed - 1], "seconds": around}))
    return rows


def _later_epochs(record: TrainRecord) -> list[list[Step]]:
    """Return the steps of each epoch after the first, which is slower; or of the first if there is no other."""
    epochs = sorted({step.epoch for step in record.steps})
    return [[step for step in record.steps if step.epoch == epoch] for epoch in epochs[1:] or epochs]


def seconds_of(record: TrainRecord) -> float:
    """Return the median seconds of an epoch."""
    return median(sum(step.seconds for step in part) for part in _later_epochs(record))


def row_of(timed: TimedRun, alone: Row | None) -> Row:
    """Return the row of a run beside the single node `alone` (None for that node): medians over the later epochs.

    Where a master merges, loading is not measured apart from computing: it is that of the single node times the largest
    share.
    """
    method, record = timed.method, timed.record
    parts, seconds = _later_epochs(record), seconds_of(record)
    idle = [min(sum(s.nodes[k].wait_seconds for s in part) for k in range(len(part[0].nodes))) for part in parts]
    busy = [max(_busy(part, k) for k in range(len(part[0].nodes))) for part in parts]
    ideal = alone["seconds"] / sum(node.speed_at(0) for node in parse_local_nodes(method.speeds)) if alone else None
    loading = median(max(sum(s.nodes[k].io_seconds for s in part) for k in range(len(part[0].nodes))) for part in parts)
    if method.arguments and alone is not None:
        loading = alone["loading_seconds"] * max(node.share for node in record.nodes)
    transfer = median(max(0.0, seconds - computing) for computing in busy) if method.arguments else median(idle)
    return {
        "nodes": method.speeds,
        "way": method.name,
        "take_part": len(record.nodes),
        "seconds": seconds,
        "of_ideal": ratio(ideal, seconds) if alone else 1.0,
        "published_of_ideal": ratio(0.5, PUBLISHED.get(method.name)) if method.speeds == "1,1" else None,
        "transfer_seconds": transfer if alone else 0.0,
        "loading_seconds": loading,
        "map": timed.accuracy,
        "bytes_sent": sum(node.bytes_sent for node in record.nodes),
        "epochs": len({step.epoch for step in record.steps}),
    }


def _busy(steps: Sequence[Step], node: int) -> float:
    """Return the seconds in which a node computed."""
    return sum(step.nodes[node].io_seconds + step.nodes[node].compute_seconds for step in steps)


def _map_of(results: Path) -> float | None:
    """Return the mAP50-95 of boxes in the last line of `results`; None for a task without boxes."""
    with results.open(encoding="utf-8", newline="") as file:
        rows = [{key.strip(): value for key, value in row.items()} for row in csv.DictReader(file)]
    value = rows[-1].get("metrics/mAP50-95(B)") if rows else None
    return float(value) if value else None


def _show(rows: Sequence[Row], records: dict[str, TrainRecord], console: Console, output: Path) -> None:
    write_csv(rows, output / "scattered-gpus.csv")
    caption = "ideal: seconds alone, before and after, over the sum of the speeds; published: two computers with a GPU"
    console.print(table_of("An epoch", _COLUMNS, rows, caption))
    if not can_draw():
        console.print(f"no page and no figure were made, because matplotlib is missing: {pip_install('report')}")
        return
    write_page(output / "report.html", records, title="Scattered GPUs")
    _draw(rows, output / "scattered-gpus.png")
    console.print(f"wrote scattered-gpus.csv, scattered-gpus.png and report.html into {output}")


def _draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the fraction of the ideal by method and nodes."""
    together = [row for row in rows if row["way"] != ALONE]
    groups = list(dict.fromkeys(row["nodes"] for row in together))
    names = list(dict.fromkeys(row["way"] for row in together))
    with canvas(9, 3.6, "An epoch on scattered nodes") as figure:
        axes = figure.subplots()
        for index, group in enumerate(groups):
            percents = {row["way"]: 100 * row["of_ideal"] for row in together if row["nodes"] == group}
            positions = [position + 0.8 * index / len(groups) for position in range(len(names))]
            axes.bar(positions, [percents[name] for name in names], 0.8 / len(groups), label=f"nodes {group}")
        known = [(position, name) for position, name in enumerate(names) if name in PUBLISHED]
        axes.plot([p for p, _ in known], [50 / PUBLISHED[name] for _, name in known], "kx", label="published")
        axes.set_xticks([position + 0.2 for position in range(len(names))], names)
        axes.set_ylabel("% of the ideal")
        axes.legend()
        save_png(figure, path)
