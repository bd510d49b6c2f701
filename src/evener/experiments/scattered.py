"""`evener experiment scattered-gpus`: one detector on nodes that each have a machine of their own (T9).

for nodes in alone, two equal ones, two of which one is half as fast:
    they meet in every batch; or train by themselves and are merged after every epoch, in three ways; or DiLoCo
    the node alone once more

Machines are not as fast at every time, so nodes are compared with the one alone right before and right after them.

Every run is a command of its own with its record: `evener yolo` where nodes meet in every batch, `evener train
--agreement` where a master merges. Published were two equal computers: an epoch took 10 s alone, 7.82 s merged by six
threads, 6.52 s merged on the accelerator, of which 0.8 s were transfer and 1.4 s loading. A batch is that of all nodes
where they meet in every one, and of each node otherwise; every batch is a step.
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
from evener.records.record import Step, TrainRecord
from evener.records.schema import read_noun
from evener.report.canvas import can_draw, canvas, save_png
from evener.report.html import write_page
from evener.system.signals import interrupt_on_stop_signals
from evener.training.console import open_console, print_line
from evener.version import pip_install

ALONE = "alone"
PUBLISHED = {"average, threads": 7.82 / 10, "average, device": 6.52 / 10}
"""Seconds of an epoch of two equal nodes over those of one alone."""
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


class Way(NamedTuple):
    """A run to be timed.

    Attributes:
        name: of the way.
        speeds: of the nodes.
        words: of `evener train`, besides those of all; none: the nodes meet in every batch.
    """

    name: str
    speeds: str
    words: tuple[str, ...]


class TimedWay(NamedTuple):
    """A run that has been timed.

    Attributes:
        way: of it.
        record: of it.
        accuracy: mAP50-95 of boxes after its last epoch; None of a task that has none.
    """

    way: Way
    record: TrainRecord
    accuracy: float | None


def ways_of(config: ScatteredConfig) -> list[Way]:
    """What is timed, in order: the node alone first, and again after every set of nodes."""
    average = ("--agreement", "average", "--merge")
    found = [Way(ALONE, "1", ())]
    for speeds in config.nodes.split(";"):
        found.append(Way("every batch", speeds, ()))
        found += [Way(f"average, {merge}", speeds, (*average, merge)) for merge in ("threads", "device", "cores")]
        found.append(Way("diloco", speeds, ("--agreement", "diloco", "--local-steps", "{an epoch}")))
        found.append(Way(ALONE, "1", ()))
    return found


def run(config: ScatteredConfig, *, as_json: bool) -> list[Row]:
    """Do the experiment; write `scattered-gpus.csv`, a page and, where matplotlib is installed, a picture.

    Args:
        config: what is asked for.
        as_json: print the rows as the last line.

    Raises:
        TrainingFailed: one of the runs failed; says why.
    """
    console, timed = open_console(as_json), list[TimedWay]()
    for number, way in enumerate(ways_of(config)):
        folder = (config.output / f"{number:02}-{way.name.replace(', ', '-').replace(' ', '-')}").resolve()
        images = samples_of(timed[0].record) if timed else 0
        _perform(command_of(config, way, folder, images), way)
        record = read_noun(folder / "record.json", TrainRecord)
        timed.append(TimedWay(way, record, _map_of(folder / "results.csv")))
        console.print(f"{way.name} on {way.speeds}: {seconds_of(record):.2f} s an epoch")
    rows = rows_of(timed)
    records = {f"{number}. {one.way.name} on {one.way.speeds}": one.record for number, one in enumerate(timed)}
    _show(rows, records, console, config.output)
    if as_json:
        print_line(json.dumps({"cells": rows}))
    return rows


def command_of(config: ScatteredConfig, way: Way, folder: Path, images: int) -> list[str]:
    """What is typed for `way`; with DiLoCo, so many local steps as an exchange an epoch of `images` takes."""
    share = 1 / sum(node.speed_at(0) for node in parse_local_nodes(way.speeds))
    steps = str(max(1, ceil(images * share / config.batch_size)))
    words = [steps if word == "{an epoch}" else word for word in way.words]
    settings = [f"imgsz={config.imgsz}", "val=False", "plots=False"]
    settings += [] if way.words else [f"nbs={config.batch_size}"]
    return [
        *("train", config.model, "--data", str(config.data), "--epochs", str(config.epochs)),
        *("--batch-size", str(config.batch_size), "--seed", str(config.seed), "--local-nodes", way.speeds, "--json"),
        *("--output", str(folder)),
        *words,
        *(word for setting in settings for word in ("--option", setting)),
    ]


def _perform(words: Sequence[str], way: Way) -> None:
    with interrupt_on_stop_signals():  # which ends the run, too
        done = subprocess.run([sys.executable, "-m", "evener", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise TrainingFailed(f"{way.name} on {way.speeds}: {said}")


def samples_of(record: TrainRecord) -> int:
    """Images of an epoch."""
    return sum(step.samples for step in record.steps if step.epoch == record.steps[0].epoch)


def rows_of(timed: Sequence[TimedWay]) -> list[Row]:
    """What is known of all runs; nodes are compared with the mean of the one alone before and after them."""
    alone = [row_of(one, None) for one in timed if one.way.name == ALONE]
    rows, passed = list[Row](), 0
    for one in timed:
        if one.way.name == ALONE:
            rows.append(alone[passed])
            passed += 1
        else:
            around = mean(row["seconds"] for row in alone[passed - 1 : passed + 1])
            rows.append(row_of(one, {**alone[passed - 1], "seconds": around}))
    return rows


def _later_epochs(record: TrainRecord) -> list[list[Step]]:
    """The steps of each epoch after the first, which is slower; of that one if there is no other."""
    epochs = sorted({step.epoch for step in record.steps})
    return [[step for step in record.steps if step.epoch == epoch] for epoch in epochs[1:] or epochs]


def seconds_of(record: TrainRecord) -> float:
    """Of an epoch, the median."""
    return median(sum(step.seconds for step in part) for part in _later_epochs(record))


def row_of(timed: TimedWay, alone: Row | None) -> Row:
    """What is known of a run beside one node `alone`, None if it is that: medians over the epochs after the first.

    Loading is not seen apart from computing where a master merges: it is that of the run alone, by the largest share.
    """
    way, record = timed.way, timed.record
    parts, seconds = _later_epochs(record), seconds_of(record)
    idle = [min(sum(s.nodes[k].wait_seconds for s in part) for k in range(len(part[0].nodes))) for part in parts]
    busy = [max(_busy(part, k) for k in range(len(part[0].nodes))) for part in parts]
    ideal = alone["seconds"] / sum(node.speed_at(0) for node in parse_local_nodes(way.speeds)) if alone else None
    loading = median(max(sum(s.nodes[k].io_seconds for s in part) for k in range(len(part[0].nodes))) for part in parts)
    if way.words and alone is not None:
        loading = alone["loading_seconds"] * max(node.share for node in record.nodes)
    transfer = median(max(0.0, seconds - one) for one in busy) if way.words else median(idle)
    return {
        "nodes": way.speeds,
        "way": way.name,
        "take_part": len(record.nodes),
        "seconds": seconds,
        "of_ideal": ratio(ideal, seconds) if alone else 1.0,
        "published_of_ideal": ratio(0.5, PUBLISHED.get(way.name)) if way.speeds == "1,1" else None,
        "transfer_seconds": transfer if alone else 0.0,
        "loading_seconds": loading,
        "map": timed.accuracy,
        "bytes_sent": sum(node.bytes_sent for node in record.nodes),
        "epochs": len({step.epoch for step in record.steps}),
    }


def _busy(steps: Sequence[Step], node: int) -> float:
    """Seconds in which a node computed."""
    return sum(step.nodes[node].io_seconds + step.nodes[node].compute_seconds for step in steps)


def _map_of(results: Path) -> float | None:
    """mAP50-95 of boxes, in the last line of `results`; None of a task that has none."""
    with results.open(newline="") as file:
        rows = [{key.strip(): value for key, value in row.items()} for row in csv.DictReader(file)]
    found = rows[-1].get("metrics/mAP50-95(B)") if rows else None
    return float(found) if found else None


def _show(rows: Sequence[Row], records: dict[str, TrainRecord], console: Console, output: Path) -> None:
    write_csv(rows, output / "scattered-gpus.csv")
    caption = "ideal: seconds alone, before and after, over the sum of the speeds; published: two computers with a GPU"
    console.print(table_of("An epoch", _COLUMNS, rows, caption))
    if not can_draw():
        console.print(f"there is no page and no picture, which need matplotlib: {pip_install('report')}")
        return
    write_page(output / "report.html", records, title="Scattered GPUs")
    _draw(rows, output / "scattered-gpus.png")
    console.print(f"wrote scattered-gpus.csv, scattered-gpus.png and report.html into {output}")


def _draw(rows: Sequence[Row], path: Path) -> None:
    """Of the ideal, by way and nodes."""
    together = [row for row in rows if row["way"] != ALONE]
    groups = list(dict.fromkeys(row["nodes"] for row in together))
    names = list(dict.fromkeys(row["way"] for row in together))
    with canvas(9, 3.6, "An epoch on scattered nodes") as figure:
        axes = figure.subplots()
        for index, group in enumerate(groups):
            own = {row["way"]: 100 * row["of_ideal"] for row in together if row["nodes"] == group}
            places = [place + 0.8 * index / len(groups) for place in range(len(names))]
            axes.bar(places, [own[name] for name in names], 0.8 / len(groups), label=f"nodes {group}")
        known = [(place, name) for place, name in enumerate(names) if name in PUBLISHED]
        axes.plot([p for p, _ in known], [50 / PUBLISHED[name] for _, name in known], "kx", label="published")
        axes.set_xticks([place + 0.2 for place in range(len(names))], names)
        axes.set_ylabel("% of the ideal")
        axes.legend()
        save_png(figure, path)
