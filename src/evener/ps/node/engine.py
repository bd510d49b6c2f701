"""The engine of a node: one for all tasks, over a backend for the task's framework.

    lease -> its samples, in the order of all nodes -> backend: forward, backward, perhaps steps -> flat state

The same job gives the same samples, seeds and learning rates with any backend, so nodes with PyTorch and nodes without
can work for one run. The state of a local optimizer stays on its node from lease to lease; a node that prepares again
begins without one.
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

from evener.agreements.data_assigner import is_one_batch
from evener.agreements.layout import Flat, StateLayout
from evener.agreements.messages import Lease, positions
from evener.agreements.settings import Outer
from evener.agreements.worker import Engine
from evener.data.sampler import permutation
from evener.data.shares import class_balanced_shares, order_of_parts
from evener.ps.protocol.job import Job
from evener.records.errors import EvenerError, InvalidInput, text_of
from evener.records.single_sample_error import is_of_lone_sample
from evener.system.pace import Pace, StepSeconds

_WARM_UP = 1
_FIXED_TOLERANCE = 1e-5
"""Relative tolerance: the same random numbers, drawn by different kinds of CPUs, differ by rounding."""
_TRIAL_SECONDS = 0.2
_PART = 4
"""A batch has so many of the smaller ones whose time shows which part of a step is fixed."""
_MAX_FIXED = 0.98
"""Largest share of a step that is taken for fixed, whatever the measurements say."""
_PLAIN = (bool, int, float, str, tuple, type(None))


class NodeEngine(Engine, Protocol):
    """A model with its data on a node, ready for one job."""

    def step_seconds(self) -> StepSeconds:
        """Measure the seconds of a gradient as a function of its samples, without a fixed part if batches are whole."""
        ...

    def validate(self, weights: Flat, first: int, size: int) -> tuple[float, float]:
        """Return the loss sum and the number of correct answers of validation samples [first, first + size).

        The model is unchanged afterwards.
        """
        ...

    def close(self) -> None:
        """Free memory and files."""
        ...


class EngineSetup(NamedTuple):
    """Parameters of an engine.

    Attributes:
        job: job to do.
        code: folder of the task's files; None for a built-in task.
        data: folder of the data; None if the task knows.
        device: device that computes.
        speed: 1, or the fraction to which the node is throttled.
        between_steps: called between local steps; raises if the run is over.
    """

    job: Job
    code: Path | None
    data: Path | None
    device: str
    speed: float
    between_steps: Callable[[], None]


Build = Callable[[EngineSetup], NodeEngine]
"""Makes the engine of a job. Raises EvenerError, or any error of the task's own code."""


class ModelBackend(Protocol):
    """A task's model, data and optimizer in one framework; its state is loaded and saved as a `Flat`.

    Attributes:
        name: name of the task.
        model: model that is trained; it has `modules()`.
        layout: layout of the state.
        fixed_sum: sum of the sizes of all parameters that are not trained, which each node makes itself; None if it is
            not known.
        num_samples: number of training samples.
        has_accuracy: whether the task counts correct answers.
        clip_norm: bound on the norm of the gradient, before a step; None for none.
        normalises: whether a layer normalises over the batch, and so may reject a single sample.
        unused: indices in the layout of parameters that the last `backward` did not reach; empty in a framework whose
            optimizers update such parameters, too.
        synchronise: waits for queued work of a GPU; None where nothing is queued.
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
        """Number of validation samples; 0 for none. The first access loads them."""
        ...

    def labels(self) -> NDArray[Any]:
        """Return the class of every training sample. Raises InvalidInput: there are no classes."""
        ...

    def initial_weights(self) -> Flat:
        """Return the state with which the model was made; call it before any computation."""
        ...

    def server_optimizer(self, num_steps: int) -> Outer:
        """Return the server's equivalent of the task's optimizer for so many steps. Raises UnknownOptimizer."""
        ...

    def write_weights(self, data: bytes, path: Path) -> None:
        """Write the weights in `data`, a safetensors file, to a safetensors file with the model's own names."""
        ...

    def prepare(self, num_steps: int) -> None:
        """Prepare to compute; a run of one process would have so many steps."""
        ...

    def set_training(self, is_training: bool) -> None:
        """Set the model to training or to evaluation."""
        ...

    def load(self, weights: Flat) -> None:
        """Load `weights` into the model."""
        ...

    def save(self, into: Flat) -> None:
        """Save the model's state."""
        ...

    def save_gradients(self, into: Flat) -> None:
        """Save the gradients of the parameters, and statistics and counters as they are."""
        ...

    def backward(self, indices: NDArray[np.int64], epoch: int, seeds: tuple[int, ...], /) -> Any:
        """Compute the gradient of the mean loss of samples [N]; return the loss, a number or a scalar tensor.

        Args:
            indices: indices of the samples in the training data.
            epoch: epoch of the samples, for random transforms.
            seeds: seeds of everything else that is random.
        """
        ...

    def read_later(self, loss: Any, /) -> Callable[[], float]:
        """Start to copy a loss of `backward` to the host; return a function that waits for it."""
        ...

    def step(self, number: int) -> None:
        """Let the task's optimizer take the step of this number, from 0, with the present gradient."""
        ...

    def evaluate(self, first: int, stop: int) -> tuple[float, float]:
        """Return the sum of the losses and the number of correct answers of validation samples [first, stop)."""
        ...

    def close(self) -> None:
        """Free memory."""
        ...


class TaskEngine:
    """The engine of a task, for any framework.

    Args:
        backend: backend of the task.
        setup: other parameters of the engine.

    Raises:
        InvalidInput: data or model differ from those of the job.
    """

    def __init__(self, backend: ModelBackend, setup: EngineSetup) -> None:
        self._backend, self._job = backend, setup.job
        self._between_steps = setup.between_steps
        self._batch, self._seed = setup.job.agreement.batch, setup.job.workload.seed
        self._lone = LoneSamples(backend)
        self._check_job()
        sizes = [size for _, size in setup.job.workload.parts]
        self._parts = class_balanced_shares(backend.labels(), sizes, self._seed) if sizes else []
        self._steps_per_epoch = -(-backend.num_samples // self._batch)
        backend.prepare((setup.job.workload.num_epochs or 1) * self._steps_per_epoch)
        backend.set_training(True)
        self._saved_state = Flat(setup.job.layout)
        self._pace = Pace(setup.speed, backend.synchronise)
        self._order = lru_cache(maxsize=2)(self._order_of)

    @property
    def layout(self) -> StateLayout:
        """Layout of the model's state."""
        return self._job.layout

    @property
    def unused(self) -> tuple[int, ...]:
        """Indices of parameters that the last backward pass did not reach."""
        return self._backend.unused

    def load(self, weights: Flat) -> None:
        """Load `weights` into the model."""
        self._backend.load(weights)

    def gradient(self, lease: Lease, into: Flat) -> float:
        """Compute the gradient of a lease's samples; return their mean loss."""
        with self._pace.computing():
            loss = self._backward(self._indices(lease), lease.samples.epoch, lease.number)
            read_loss = self._backend.read_later(loss)
            self._backend.save_gradients(into)
        return read_loss()

    def local_steps(self, lease: Lease, into: Flat) -> float:
        """Take the local steps of a lease; return the mean loss of its samples."""
        indices, first, batch = self._indices(lease), lease.samples.epoch * self._steps_per_epoch, self._batch
        steps = (
            first + positions(lease.samples) // batch
        )  # step of one process in which it would learn from each sample
        total: Any = 0.0
        for number in range(lease.num_steps):
            step_indices = indices[number * batch : (number + 1) * batch]
            with self._pace.computing():
                total = total + self._backward(step_indices, lease.samples.epoch, lease.number, number) * len(
                    step_indices
                )
                self._backend.step(int(steps[number * batch]))
            self._between_steps()
        self._backend.save(into)
        return float(total) / len(indices)

    def step_seconds(self, trial_seconds: float = _TRIAL_SECONDS) -> StepSeconds:
        """Measure the seconds of a gradient of a full batch and, if batches are divided, of a part."""
        batch = min(self._batch, self._backend.num_samples)
        self._backend.save(self._saved_state)
        whole, fixed, part = self._least_seconds(batch, trial_seconds), 0.0, batch // _PART
        if is_one_batch(self._job.agreement) and part > 1:  # BatchNorm refuses a single sample
            each = (whole - self._least_seconds(part, trial_seconds)) / (batch - part)
            fixed = min(max(whole - each * batch, 0.0), _MAX_FIXED * whole)
        self._backend.load(self._saved_state)
        return StepSeconds(fixed=fixed, each=(whole - fixed) / batch)

    def _least_seconds(self, num_samples: int, trial_seconds: float) -> float:
        """Return the least seconds of a gradient, of those within `trial_seconds` and one more."""
        until, best = time.perf_counter() + trial_seconds, inf
        for tries in count():
            begun = time.perf_counter()
            if tries > _WARM_UP and begun > until:
                break
            with self._pace.computing(), plain_state_preserved(self._backend.model):
                float(self._backward(np.arange(num_samples, dtype=np.int64), 0))
            best = min(best, time.perf_counter() - begun)
        return best

    def validate(self, weights: Flat, first: int, size: int) -> tuple[float, float]:
        """Return the loss sum and the number of correct answers of validation samples [first, first + size)."""
        backend = self._backend
        backend.save(self._saved_state)
        backend.load(weights)
        backend.set_training(False)
        loss, correct = 0.0, 0.0
        for start in range(first, first + size, self._batch):
            with self._pace.computing():
                sums = backend.evaluate(start, min(start + self._batch, first + size))
            loss, correct = loss + sums[0], correct + sums[1]
            self._between_steps()
        backend.set_training(True)
        backend.load(self._saved_state)
        return loss, correct

    def close(self) -> None:
        """Free memory and files."""
        self._backend.close()

    def _check_job(self) -> None:
        job, backend = self._job, self._backend
        for what, available, wanted in (
            ("training", backend.num_samples, job.workload.num_samples),
            ("validation", backend.num_validation if job.num_validation else 0, job.num_validation),
        ):
            if available != wanted:
                raise InvalidInput(
                    f"there are {available} {what} samples here and {wanted} where the run was submitted"
                )
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
        """Return the indices of a lease's samples."""
        return self._order(lease.samples.epoch)[positions(lease.samples)]

    def _backward(self, indices: NDArray[np.int64], epoch: int, *seeds: int) -> Any:
        return self._backend.backward(self._lone.enough(indices), epoch, (self._seed, *seeds))


@contextmanager
def plain_state_preserved(model: Any) -> Iterator[None]:
    """Restore numbers, texts and flags in the modules of `model`, such as counters of calls and schedules."""
    states = [
        (module, {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, values in states:
            vars(module).update(values)


class LoneSamples:
    """Repeats a single sample if a layer that normalises over the batch rejects one.

    The mean loss, its gradient and the mean of the statistics stay those of the sample. A share of one sample results
    from uneven shares, not from the user's choice. A layer with several values of a sample in each channel takes one.

    Args:
        backend: backend of the task.
    """

    def __init__(self, backend: ModelBackend) -> None:
        self._backend = backend
        self._rejects: bool | None = None if backend.normalises else False

    def enough(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples [N] to learn from."""
        if len(indices) != 1:
            return indices
        if self._rejects is None:
            self._rejects = self._tries(indices)
        return indices.repeat(2) if self._rejects else indices

    def _tries(self, indices: NDArray[np.int64]) -> bool:
        """Compute the sample, and restore the model; return whether a layer rejects it."""
        state = Flat(self._backend.layout)
        self._backend.save(state)
        try:
            with plain_state_preserved(self._backend.model):
                self._backend.backward(indices, 0, (0,))
        except (ValueError, EvenerError) as error:
            return is_of_lone_sample(text_of(error))
        finally:
            self._backend.load(state)
        return False
