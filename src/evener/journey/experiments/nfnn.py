"""`evener experiment nfnn`: NfNN's experiment (A10) on Evener's parameter server, beside what was published.

for workers in 1, 2, 3:
    a master and that many thin nodes, each a process with one thread
    for mode in sync, async; for every repetition:
        5000 updates of a 784-32-10 perceptron on MNIST; seconds, accuracy, bytes

The published server adds the workers' gradients up, ours averages them: so that both do the same, the rate of a
synchronous run is multiplied by the number of workers.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from safetensors.numpy import load as load_weights

from evener import autodiff as ad
from evener.errors import EvenerError, require
from evener.journey.console import open_console, print_line
from evener.journey.experiments.nfnn_report import MODES, Cell, line, show, words
from evener.journey.experiments.thin_cluster import thin_cluster
from evener.noun import parse_noun
from evener.record import TrainRecord
from evener.star.control import Control
from evener.star.job import Job
from evener.star.thin_engine import layout_of_thin_model, thin_model
from evener.sync.agreement import Agreement, Sgd
from evener.sync.flat import flat_of
from evener.sync.workload import Workload
from evener.task import ThinTask
from evener.tasks import load_thin_task
from evener.tasks.thin.nfnn import BATCH, FOLDER, LEARNING_RATE

_STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Quantile of Student's distribution for a 95 % confidence interval of the mean of so many values."""


class Plan(NamedTuple):
    """What to do.

    Attributes:
        data: folder of MNIST.
        updates: of the common weights in a run.
        workers: numbers of them to try.
        modes: of MODES.
        repeat: runs of every cell.
        seed: of weights and order of samples, the same in all runs.
    """

    data: Path
    updates: int
    workers: tuple[int, ...]
    modes: tuple[str, ...]
    repeat: int
    seed: int


class _Run(NamedTuple):
    seconds: float
    accuracy: float
    bytes_sent: int
    bytes_received: int


def nfnn(
    *,
    data: Path | None,
    updates: int,
    workers: str,
    modes: str,
    repeat: int,
    seed: int,
    output: Path,
    as_json: bool,
) -> list[Cell]:
    """Do the experiment; write `nfnn.csv` and, where matplotlib is installed, `nfnn.png` into `output`.

    Raises:
        InvalidValue: a number is not positive, or a mode unknown.
        MissingFile: MNIST is not there; says what to fetch from where.
    """
    plan = Plan(data or FOLDER, updates, _numbers(workers), _modes(modes), repeat, seed)
    require(updates > 0, "--updates", updates, "positive")
    require(repeat > 0, "--repeat", repeat, "positive")
    console = open_console(as_json)
    task = load_thin_task("nfnn", plan.data)
    task.train_data()
    cells: list[Cell] = []
    for count in plan.workers:
        with (
            tempfile.TemporaryDirectory(prefix="evener-") as folder,
            thin_cluster(count, plan.data.resolve(), Path(folder)) as control,
        ):
            for mode in plan.modes:
                runs = [_run(control, task, mode, count, plan, number) for number in range(repeat)]
                cells.append(_cell(mode, count, runs, updates))
                console.print(line(cells[-1]))
    cells.sort(key=lambda cell: (MODES.index(cell.mode), cell.workers))
    show(cells, console, output)
    if as_json:
        print_line(json.dumps({"cells": [words(cell) for cell in cells]}))
    return cells


def _run(control: Control, task: ThinTask, mode: str, workers: int, plan: Plan, number: int) -> _Run:
    job, model = _job(task, mode, workers, plan, number)
    weights = flat_of(job.layout, {name: tensor.detach().numpy() for name, tensor in model.named_parameters()})
    control.submit(job, weights, [])
    result = control.watch(job.run, lambda _: None, lambda: None)
    if result.exit_code:
        raise EvenerError(result.reason)
    record = parse_noun(result.record, TrainRecord, source="the master's record")
    model.load_state_dict(load_weights(result.weights))
    sent, received = (sum(getattr(n, f"bytes_{way}") for n in record.nodes) for way in ("sent", "received"))
    return _Run(record.seconds, _accuracy(task, model), sent, received)


def _job(task: ThinTask, mode: str, workers: int, plan: Plan, number: int) -> tuple[Job, ad.nn.Module]:
    model = thin_model(task, plan.seed, "fp32")
    is_sync = mode == "sync"
    rate = LEARNING_RATE * workers if is_sync else LEARNING_RATE
    agreement = Agreement(
        batch=BATCH, outer=Sgd(learning_rate=rate), staleness=0 if is_sync else None, division="fixed"
    )
    job = Job(
        run=f"nfnn-{mode}-{workers}-{number}",
        task="nfnn",
        title="nfnn",
        data_dir=str(plan.data.resolve()),
        protocol=mode,
        agreement=agreement,
        workload=Workload(num_samples=len(task.train_data()[0]), num_updates=plan.updates, seed=plan.seed),
        layout=layout_of_thin_model(model),
    )
    return job, model


def _accuracy(task: ThinTask, model: ad.nn.Module) -> float:
    assert task.validation_data is not None
    images, labels = task.validation_data()
    with ad.no_grad():
        return float((model(ad.from_numpy(images)).numpy().argmax(1) == labels).mean())


def _cell(mode: str, workers: int, runs: Sequence[_Run], updates: int) -> Cell:
    seconds = [run.seconds for run in runs]
    return Cell(
        mode=mode,
        workers=workers,
        seconds=mean(seconds),
        seconds_interval=_interval(seconds),
        accuracy=mean(run.accuracy for run in runs),
        bytes_sent=round(mean(run.bytes_sent for run in runs)),
        bytes_received=round(mean(run.bytes_received for run in runs)),
        updates_per_second=updates / mean(seconds),
        updates=updates,
    )


def _interval(values: Sequence[float]) -> float | None:
    """Half of the 95 % confidence interval of the mean, by Student's distribution; None for one value."""
    count = len(values)
    return _STUDENT.get(count, 2.0) * stdev(values) / sqrt(count) if count > 1 else None


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(item) if item.strip().isdecimal() else 0 for item in text.split(","))
    require(all(numbers), "--workers", text, "positive numbers such as 1,2,3")
    return numbers


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(item.strip() for item in text.split(","))
    require(bool(modes) and set(modes) <= set(MODES), "--mode", text, "sync, async or sync,async")
    return modes
