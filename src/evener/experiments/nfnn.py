"""`evener experiment nfnn`: NfNN's experiment (A10) on Evener's parameter server, beside what was published.

for workers in 1, 2, 3:
    a master and that many thin nodes, each a process with one thread
    for mode in sync, async; for every repetition:
        5000 updates of a 784-32-10 perceptron on MNIST; seconds, accuracy, bytes

The published server adds the workers' gradients up, ours averages them: so that both do the same, the rate of a
synchronous run is multiplied by the number of workers.

All runs begin with the weights of one seed, as the published ones did: those of one worker agree to the last digit
between the modes. The order of the samples is another one in each repetition; accuracy is the mean over them. Weights
matter more than the order does: with one worker 20 seeds come to 79.9 to 83.9 % (mean 82.2 %), 8 orders of one seed to
83.6 to 84.2 %.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from safetensors.numpy import load as load_weights

from evener import autodiff as ad
from evener.errors import EvenerError, require
from evener.experiments.nfnn_report import MODES, NfnnCell, as_row, line, show
from evener.experiments.options import NfnnConfig, numbers
from evener.launch.nodes import LocalNode
from evener.ps.job import Job
from evener.ps.master_client import MasterClient
from evener.ps.thin_backend import ThinBackend
from evener.record import TrainRecord
from evener.run.console import open_console, print_line
from evener.run.options import PATIENCE
from evener.run.ps_local import local_cluster
from evener.schema import parse_noun
from evener.signals import sigterm_is_ctrl_c
from evener.sync.layout import StateLayout
from evener.sync.protocol import Sgd, SyncProtocol, Workload
from evener.task import ThinTask
from evener.tasks.load import load_thin_task
from evener.tasks.thin import MNIST_FOLDER, NFNN_BATCH, NFNN_RATE


class NfnnRun(NamedTuple):
    """A run.

    Attributes:
        mode: sync or async.
        workers: that take part.
        updates: of the common weights.
        weights_seed: of the weights that it begins with.
        order_seed: of the order of the samples.
    """

    mode: str
    workers: int
    updates: int
    weights_seed: int
    order_seed: int


class NfnnOutcome(NamedTuple):
    """What came of a run.

    Attributes:
        seconds: from the first lease to the last update.
        accuracy: on the validation data.
        bytes_sent: gradients of all workers together.
        bytes_received: weights, likewise.
    """

    seconds: float
    accuracy: float
    bytes_sent: int
    bytes_received: int


class NfnnMaster:
    """A master with its nodes, and the data to validate with.

    Args:
        task: nfnn.
        data: folder of MNIST, on this machine and the nodes.
        control: connection to the master.
        check: called every now and then during a run; may raise.
    """

    def __init__(self, task: ThinTask, data: Path, control: MasterClient, check: Callable[[], None]) -> None:
        assert task.validation_data is not None
        self._task, self._data, self._control, self._check = task, data, control, check
        self._num_samples = len(task.train_data()[0])
        self._images, self._labels = task.validation_data()

    def run(self, wanted: NfnnRun) -> NfnnOutcome:
        """Do it. Raises EvenerError: it ended before it was complete."""
        backend = ThinBackend(self._task, wanted.weights_seed, "fp32")
        job = self._job(wanted, backend.layout)
        self._control.submit(job, backend.initial_weights(), [])
        result = self._control.watch(job.run, lambda _: None, self._check)
        if result.exit_code:
            error = EvenerError(result.reason)
            error.exit_code = result.exit_code
            raise error
        record = parse_noun(result.record, TrainRecord, source="the master's record")
        backend.model.load_state_dict(load_weights(result.weights))
        return NfnnOutcome(
            seconds=record.seconds,
            accuracy=self._accuracy(backend.model),
            bytes_sent=sum(node.bytes_sent for node in record.nodes),
            bytes_received=sum(node.bytes_received for node in record.nodes),
        )

    def _job(self, wanted: NfnnRun, layout: StateLayout) -> Job:
        is_sync = wanted.mode == "sync"
        rate = NFNN_RATE * wanted.workers if is_sync else NFNN_RATE
        return Job(
            run=f"nfnn-{wanted.mode}-{wanted.workers}-{wanted.order_seed}",
            task="nfnn",
            title="nfnn",
            data_dir=str(self._data),
            protocol=wanted.mode,
            agreement=SyncProtocol(
                batch=NFNN_BATCH, outer=Sgd(learning_rate=rate), staleness=0 if is_sync else None, division="fixed"
            ),
            workload=Workload(num_samples=self._num_samples, num_updates=wanted.updates, seed=wanted.order_seed),
            layout=layout,
        )

    def _accuracy(self, model: ad.nn.Module) -> float:
        with ad.no_grad():
            return float((model(ad.from_numpy(self._images)).numpy().argmax(1) == self._labels).mean())


_STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Quantile of Student's distribution for a 95 % confidence interval of the mean of so many values; more: the last."""


def run(config: NfnnConfig, *, as_json: bool) -> list[NfnnCell]:
    """Do the experiment; write `nfnn.csv` and, where matplotlib is installed, `nfnn.png`.

    Args:
        config: what is asked for; the first repetition takes its seed for the order of the samples, too, the next ones
            take the seeds after it.
        as_json: print the cells as the last line.

    Raises:
        MissingFile: MNIST is not there; says what to fetch from where.
    """
    source = (config.data or MNIST_FOLDER).resolve()
    task = load_thin_task("nfnn", config.data or MNIST_FOLDER)
    num_samples = len(task.train_data()[0])
    require(num_samples >= NFNN_BATCH, "training samples", num_samples, f"at least {NFNN_BATCH}, a batch")
    console = open_console(as_json)
    cells: list[NfnnCell] = []
    with sigterm_is_ctrl_c():
        for count in numbers("--workers", config.workers):
            nodes = [LocalNode(name=f"worker-{number}", threads=1) for number in range(count)]
            with (
                local_cluster(nodes, PATIENCE, thin=True, data=source) as cluster,
                MasterClient(cluster.address, cluster.token, PATIENCE) as client,
            ):
                cluster.wait_for_nodes(client)
                master = NfnnMaster(task, source, client, cluster.check_all)
                for mode in config.modes:
                    orders = range(config.seed, config.seed + config.repeat)
                    runs = [master.run(NfnnRun(mode, count, config.updates, config.seed, order)) for order in orders]
                    cells.append(_cell(mode, count, runs, config.updates))
                    console.print(line(cells[-1]))
    cells.sort(key=lambda cell: (MODES.index(cell.mode), cell.workers))
    show(cells, console, config.output)
    if as_json:
        print_line(json.dumps({"cells": [as_row(cell) for cell in cells]}))
    return cells


def _cell(mode: str, workers: int, runs: Sequence[NfnnOutcome], updates: int) -> NfnnCell:
    seconds = [run.seconds for run in runs]
    return NfnnCell(
        mode=mode,
        workers=workers,
        seconds=mean(seconds),
        seconds_interval=_interval(seconds),
        accuracy=mean(run.accuracy for run in runs),
        accuracy_interval=_interval([run.accuracy for run in runs]),
        bytes_sent=round(mean(run.bytes_sent for run in runs)),
        bytes_received=round(mean(run.bytes_received for run in runs)),
        updates_per_second=updates / mean(seconds),
        updates=updates,
    )


def _interval(values: Sequence[float]) -> float | None:
    """Half of the 95 % confidence interval of the mean, by Student's distribution; None for one value."""
    count = len(values)
    return _STUDENT[min(count, max(_STUDENT))] * stdev(values) / sqrt(count) if count > 1 else None
