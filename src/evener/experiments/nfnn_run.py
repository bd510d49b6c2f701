"""One run of NfNN's experiment: the job, submitted to a master that has its nodes, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from safetensors.numpy import load as load_weights

from evener import autodiff as ad
from evener.errors import EvenerError
from evener.ps.job import Job
from evener.ps.master_client import MasterClient
from evener.ps.thin_backend import ThinBackend
from evener.record import TrainRecord
from evener.schema import parse_noun
from evener.sync.layout import StateLayout
from evener.sync.protocol import Sgd, SyncProtocol, Workload
from evener.task import ThinTask
from evener.tasks.thin.nfnn import BATCH, LEARNING_RATE


class Wanted(NamedTuple):
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


class Outcome(NamedTuple):
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


class Bench:
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

    def run(self, wanted: Wanted) -> Outcome:
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
        return Outcome(
            seconds=record.seconds,
            accuracy=self._accuracy(backend.model),
            bytes_sent=sum(node.bytes_sent for node in record.nodes),
            bytes_received=sum(node.bytes_received for node in record.nodes),
        )

    def _job(self, wanted: Wanted, layout: StateLayout) -> Job:
        is_sync = wanted.mode == "sync"
        rate = LEARNING_RATE * wanted.workers if is_sync else LEARNING_RATE
        return Job(
            run=f"nfnn-{wanted.mode}-{wanted.workers}-{wanted.order_seed}",
            task="nfnn",
            title="nfnn",
            data_dir=str(self._data),
            protocol=wanted.mode,
            agreement=SyncProtocol(
                batch=BATCH, outer=Sgd(learning_rate=rate), staleness=0 if is_sync else None, division="fixed"
            ),
            workload=Workload(num_samples=self._num_samples, num_updates=wanted.updates, seed=wanted.order_seed),
            layout=layout,
        )

    def _accuracy(self, model: ad.nn.Module) -> float:
        with ad.no_grad():
            return float((model(ad.from_numpy(self._images)).numpy().argmax(1) == self._labels).mean())
