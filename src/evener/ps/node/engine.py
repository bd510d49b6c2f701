"""What computes on a node: one engine for all tasks, over a backend that knows the framework that a task is for.

    lease -> its samples, in the order of all nodes -> backend: forward, backward, perhaps steps -> flat state

The same job gives the same samples, seeds and learning rates whatever the backend is: nodes with PyTorch and nodes
without serve one run side by side. The state of the optimiser of local steps stays on its node from lease to lease; a
node that comes new, or makes ready anew, begins with none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import count
from math import inf, isclose
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from evener.data.sampler import permutation
from evener.data.shares import class_balanced_shares, order_of_parts
from evener.ps.protocol.job import Job
from evener.records.errors import InvalidInput
from evener.sync.layout import Flat, StateLayout
from evener.sync.messages import Lease, positions
from evener.sync.protocol import Outer
from evener.sync.worker import Engine
from evener.system.pace import Pace

_WARM_UP = 1
_FIXED_TOLERANCE = 1e-5
"""Relative: the same numbers, drawn by processors of different kinds, differ by rounding."""
_TRIAL_SECONDS = 0.2
_PLAIN = (bool, int, float, str, tuple, type(None))


class NodeEngine(Engine, Protocol):
    """A model with its data on a node, ready for one job."""

    def unit_seconds(self) -> float:
        """Seconds that one sample takes in a batch of the size that is to be expected, measured now."""
        ...

    def validate(self, weights: Flat, first: int, size: int) -> tuple[float, float]:
        """Sum of the losses, and number of right answers, of samples [first, first + size) for validation.

        The model is afterwards what it was before.
        """
        ...

    def close(self) -> None:
        """Let go of memory and files."""
        ...


class EngineSetup(NamedTuple):
    """What an engine is made from.

    Attributes:
        job: to be done.
        code: folder of the task's files; None for a built-in task.
        data: folder of the data; None if the task knows.
        device: that computes.
        speed: 1, or the fraction to which the node is slowed down.
        between_steps: to be called between local steps: raises if the run is over.
    """

    job: Job
    code: Path | None
    data: Path | None
    device: str
    speed: float
    between_steps: Callable[[], None]


Build = Callable[[EngineSetup], NodeEngine]
"""Makes the engine of a job. Raises EvenerError, or whatever the task's own code raises."""


class ModelBackend(Protocol):
    """A task's model, data and optimiser in one framework; its state goes in and out as a `Flat`.

    Attributes:
        name: of the task.
        model: that is trained; it has `modules()`.
        layout: of the state.
        fixed_sum: sum of the sizes of all parameters that are not trained, which each node makes itself; None
            if it is not known.
        num_samples: for training.
        has_accuracy: whether the task says how many answers are right.
        clip_norm: bound on the norm of the gradient, before a step; None for none.
        normalises: whether a layer normalises over the batch, and so refuses a lone sample.
        unused: places in the layout of parameters that the last `backward` did not reach; in a framework whose
            optimisers move such parameters, too, none.
        synchronise: waits for the work that a GPU has been given; None where nothing runs ahead.
    """

    name: str
    model: Any
    layout: StateLayout
    fixed_sum: float | None
    num_samples: int
    has_accuracy: bool
    clip_norm: float | None
    normalises: bool
    synchronise: Callable[[], None] | None

    @property
    def unused(self) -> tuple[int, ...]:
        """See above."""
        ...

    @property
    def num_validation(self) -> int:
        """Samples for validation; 0 for none. They are loaded when they are first asked for."""
        ...

    def labels(self) -> NDArray[Any]:
        """The class of every sample for training. Raises InvalidInput: there is none."""
        ...

    def initial_weights(self) -> Flat:
        """The state with which the model was made; to be asked for before anything is computed."""
        ...

    def server_optimizer(self, num_steps: int) -> Outer:
        """What the server has to do in so many steps to do as the task's optimiser. Raises UnknownOptimizer."""
        ...

    def write_weights(self, data: bytes, path: Path) -> None:
        """Write the weights in `data`, of a safetensors file, to a safetensors file with the model's own names."""
        ...

    def prepare(self, num_steps: int) -> None:
        """Make ready to compute; a run of one process would have so many steps."""
        ...

    def set_training(self, is_training: bool) -> None:
        """Have the model learn, or only be evaluated."""
        ...

    def load(self, weights: Flat) -> None:
        """Have the model be what `weights` says."""
        ...

    def save(self, into: Flat) -> None:
        """Write down what the model is."""
        ...

    def save_gradients(self, into: Flat) -> None:
        """Write down the gradients of the parameters, and statistics and counters as they are."""
        ...

    def backward(self, indices: NDArray[np.int64], epoch: int, seeds: tuple[int, ...], /) -> Any:
        """The mean loss of samples [N], a number or a scalar tensor; the model has its gradient.

        Args:
            indices: of the samples in the training data.
            epoch: of them, for random transforms.
            seeds: of whatever else is random.
        """
        ...

    def step(self, number: int) -> None:
        """Let the task's optimiser take the step of this number, from 0, with the gradient that there is."""
        ...

    def evaluate(self, first: int, stop: int) -> tuple[float, float]:
        """Sum of the losses and number of right answers of samples [first, stop) for validation."""
        ...

    def close(self) -> None:
        """Let go of memory."""
        ...


class TaskEngine:
    """The engine of a task, whatever the framework.

    Args:
        backend: the task's.
        setup: what else the engine is made from.

    Raises:
        InvalidInput: data or model are not those of the job.
    """

    def __init__(self, backend: ModelBackend, setup: EngineSetup) -> None:
        self._backend, self._job = backend, setup.job
        self._between_steps = setup.between_steps
        self._batch, self._seed = setup.job.agreement.batch, setup.job.workload.seed
        self._check_job()
        sizes = [size for _, size in setup.job.workload.parts]
        self._parts = class_balanced_shares(backend.labels(), sizes, self._seed) if sizes else []
        self._steps_per_epoch = -(-backend.num_samples // self._batch)
        backend.prepare((setup.job.workload.num_epochs or 1) * self._steps_per_epoch)
        backend.set_training(True)
        self._kept = Flat(setup.job.layout)
        self._pace = Pace(setup.speed, backend.synchronise)
        self._order = lru_cache(maxsize=2)(self._order_of)

    @property
    def layout(self) -> StateLayout:
        """See `Engine`."""
        return self._job.layout

    @property
    def unused(self) -> tuple[int, ...]:
        """See `Engine`."""
        return self._backend.unused

    def load(self, weights: Flat) -> None:
        """See `Engine`."""
        self._backend.load(weights)

    def gradient(self, lease: Lease, into: Flat) -> float:
        """See `Engine`."""
        with self._pace.computing():
            loss = self._backward(self._indices(lease), lease.samples.epoch, lease.number)
            self._backend.save_gradients(into)
        return float(loss)

    def local_steps(self, lease: Lease, into: Flat) -> float:
        """See `Engine`."""
        indices, first, batch = self._indices(lease), lease.samples.epoch * self._steps_per_epoch, self._batch
        steps = first + positions(lease.samples) // batch  # in which one process would learn from each sample
        total: Any = 0.0
        for number in range(lease.num_steps):
            own = indices[number * batch : (number + 1) * batch]
            with self._pace.computing():
                total = total + self._backward(own, lease.samples.epoch, lease.number, number) * len(own)
                self._backend.step(int(steps[number * batch]))
            self._between_steps()
        self._backend.save(into)
        return float(total) / len(indices)

    def unit_seconds(self, trial_seconds: float = _TRIAL_SECONDS) -> float:
        """See `NodeEngine`; it computes once more after `trial_seconds`."""
        batch = min(self._batch, self._backend.num_samples)
        self._backend.save(self._kept)
        until, best = time.perf_counter() + trial_seconds, inf
        for tries in count():
            begun = time.perf_counter()
            if tries > _WARM_UP and begun > until:
                break
            with self._pace.computing(), plain_state_kept(self._backend.model):
                float(self._backward(np.arange(batch, dtype=np.int64), 0))
            best = min(best, time.perf_counter() - begun)
        self._backend.load(self._kept)
        return best / batch

    def validate(self, weights: Flat, first: int, size: int) -> tuple[float, float]:
        """See `NodeEngine`."""
        backend = self._backend
        backend.save(self._kept)
        backend.load(weights)
        backend.set_training(False)
        loss, correct = 0.0, 0.0
        for start in range(first, first + size, self._batch):
            with self._pace.computing():
                sums = backend.evaluate(start, min(start + self._batch, first + size))
            loss, correct = loss + sums[0], correct + sums[1]
            self._between_steps()
        backend.set_training(True)
        backend.load(self._kept)
        return loss, correct

    def close(self) -> None:
        """See `NodeEngine`."""
        self._backend.close()

    def _check_job(self) -> None:
        job, backend = self._job, self._backend
        for what, found, wanted in (
            ("training", backend.num_samples, job.workload.num_samples),
            ("validation", backend.num_validation if job.num_validation else 0, job.num_validation),
        ):
            if found != wanted:
                raise InvalidInput(f"there are {found} {what} samples here and {wanted} where the run was submitted")
        if backend.layout != job.layout:
            raise InvalidInput("the task's model has other arrays here than where the run was submitted")
        sums = backend.fixed_sum, job.fixed_sum
        if None not in sums and not isclose(*cast(tuple[float, float], sums), rel_tol=_FIXED_TOLERANCE):
            raise InvalidInput(
                "the parameters that are not trained have other values here than where the run was submitted: "
                "have the task load them from a file, or draw them with PyTorch alone, which Evener seeds"
            )

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if self._parts:
            return order_of_parts(self._parts, self._seed, epoch)
        return permutation(self._backend.num_samples, self._seed, epoch)

    def _indices(self, lease: Lease) -> NDArray[np.int64]:
        """The samples of a lease."""
        return self._order(lease.samples.epoch)[positions(lease.samples)]

    def _backward(self, indices: NDArray[np.int64], epoch: int, *seeds: int) -> Any:
        enough = enough_samples(indices, normalises=self._backend.normalises)
        return self._backend.backward(enough, epoch, (self._seed, *seeds))


@contextmanager
def plain_state_kept(model: Any) -> Iterator[None]:
    """Restore numbers, words and flags that the modules of `model` hold: counters of calls, schedules of their own."""
    kept = [
        (module, {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, values in kept:
            vars(module).update(values)


def enough_samples(indices: NDArray[np.int64], *, normalises: bool) -> NDArray[np.int64]:
    """Samples [N] to learn from; one alone is taken twice if a layer normalises over the batch, which refuses one.

    The mean loss, its gradient and the mean of the statistics are those of the sample; shares are uneven, and nobody
    chose to have one sample only.
    """
    return indices.repeat(2) if normalises and len(indices) == 1 else indices
