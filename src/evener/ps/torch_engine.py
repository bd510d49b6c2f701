"""The engine of PyTorch tasks: gradients and local steps on leased samples, on a CPU or a GPU.

Samples come in the order of the collective plane, and random transforms look as they do there: what is learned from
does not depend on who computes. The state of the optimiser of local steps stays on its node from lease to lease; a node
that comes new, or makes ready anew, begins with none.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from functools import lru_cache
from itertools import count
from math import inf
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from evener.data.loader import collect, seed_all, split_batch, to_device
from evener.data.sampler import permutation
from evener.errors import InvalidInput
from evener.ps.engine import Workshop, enough
from evener.ps.pace import Pace
from evener.ps.torch_schedule import apply, optimizer_of, schedule_of, settings_at
from evener.ps.torch_state import TorchState, layout_of_model
from evener.sync.flat import Flat
from evener.sync.layout import Layout
from evener.sync.messages import Lease
from evener.sync.samples import positions
from evener.task import Task

_WARM_UP = 1
_TRIAL_SECONDS = 0.2


class Precision(Protocol):
    """Which numbers are computed with."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Inside, operations choose their type."""
        ...

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """The model on its device, with weights of the right type."""
        ...

    def prepare(self, value: Any) -> Any:
        """`value` with tensors of the right type."""
        ...


class TorchEngine:
    """A task's model and data on one device.

    Args:
        task: to be computed.
        workshop: what else the engine is made from.
        precision: of computing.

    Raises:
        InvalidInput: data or model are not those of the job.
    """

    def __init__(self, task: Task, workshop: Workshop, precision: Precision) -> None:
        self._task, self._precision, self._job = task, precision, workshop.job
        self._between_steps = workshop.between_steps
        self._device = torch.device(workshop.device)
        self._train = task.train_data()
        is_validated = workshop.job.num_validation > 0
        self._validation = task.validation_data() if task.validation_data and is_validated else None
        self._check_data()
        seed_all(self._seed)
        self._model = precision.prepare_model(task.model())
        if layout_of_model(self._model) != workshop.job.layout:
            raise InvalidInput("the task's model has other arrays here than where the run was submitted")
        self._normalises = any(isinstance(module, _BatchNorm) for module in self._model.modules())
        self._state = TorchState(self._model, workshop.job.layout)
        self._kept = Flat(workshop.job.layout)
        self._optimizer = optimizer_of(task, self._model.parameters())
        self._schedule = schedule_of(task, self._model, self._num_steps)
        self._pace = Pace(workshop.speed, torch.cuda.synchronize if self._device.type == "cuda" else None)
        self._order = lru_cache(maxsize=2)(self._order_of)

    @property
    def layout(self) -> Layout:
        """See `Engine`."""
        return self._job.layout

    def load(self, weights: Flat) -> None:
        """See `Engine`."""
        self._state.load(weights)

    def gradient(self, lease: Lease, into: Flat) -> float:
        """See `Engine`."""
        self._model.train()
        with self._pace.computing():
            loss = self._backward(self._indices(lease), lease.samples.epoch, lease.number)
            self._state.save_gradients(into)
        return float(loss)

    def local_steps(self, lease: Lease, into: Flat) -> float:
        """See `Engine`."""
        self._model.train()
        indices, steps, batch = self._indices(lease), self._steps(lease), self._job.agreement.batch
        losses = []
        for number in range(lease.num_steps):
            own = indices[number * batch : (number + 1) * batch]
            with self._pace.computing():
                losses.append(self._backward(own, lease.samples.epoch, lease.number, number) * len(own))
                apply(self._optimizer, settings_at(self._schedule, int(steps[number * batch])))
                self._optimizer.step()
            self._between_steps()
        self._state.save(into)
        return float(torch.stack(losses).sum()) / len(indices)

    def unit_seconds(self) -> float:
        """See `NodeEngine`."""
        batch = min(self._job.agreement.batch, len(self._train))  # type: ignore[arg-type]
        indices = np.arange(batch, dtype=np.int64)
        self._state.save(self._kept)
        self._model.train()
        until, best = time.perf_counter() + _TRIAL_SECONDS, inf
        for tries in count():
            begun = time.perf_counter()
            if tries > _WARM_UP and begun > until:
                break
            with self._pace.computing():
                float(self._backward(indices, 0))
            best = min(best, time.perf_counter() - begun)
        self._state.load(self._kept)
        return best / batch

    @torch.no_grad()
    def assess(self, weights: Flat, first: int, size: int) -> tuple[float, float]:
        """See `NodeEngine`."""
        self._state.save(self._kept)
        self._state.load(weights)
        self._model.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        batch = self._job.agreement.batch
        for start in range(first, first + size, batch):
            with self._pace.computing():
                sums += self._sums(np.arange(start, min(start + batch, first + size), dtype=np.int64))
            self._between_steps()
        self._state.load(self._kept)
        loss, correct = sums.tolist()
        return loss, correct

    def close(self) -> None:
        """See `NodeEngine`."""
        self._optimizer.state.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def _seed(self) -> int:
        return self._job.workload.seed

    @property
    def _num_steps(self) -> int:
        """Steps in which one process would do all epochs."""
        return (self._job.workload.num_epochs or 1) * -(-self._num_samples // self._job.agreement.batch)

    @property
    def _num_samples(self) -> int:
        found = self._job.workload.num_samples
        assert found is not None, "data that stay on their nodes are not for this engine"
        return found

    def _check_data(self) -> None:
        for what, dataset, wanted in (
            ("training", self._train, self._job.workload.num_samples),
            ("validation", self._validation, self._job.num_validation),
        ):
            found = len(dataset) if dataset is not None else 0  # type: ignore[arg-type]
            if found != wanted:
                raise InvalidInput(f"there are {found} {what} samples here and {wanted} where the run was submitted")

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        return permutation(self._num_samples, self._seed, epoch)

    def _indices(self, lease: Lease) -> NDArray[np.int64]:
        """The samples of a lease."""
        return self._order(lease.samples.epoch)[positions(lease.samples)]

    def _steps(self, lease: Lease) -> NDArray[np.int64]:
        """For each sample the step, from 0, in which one process would learn from it: that step's rate is used."""
        batch = self._job.agreement.batch
        return lease.samples.epoch * -(-self._num_samples // batch) + positions(lease.samples) // batch

    def _backward(self, indices: NDArray[np.int64], epoch: int, *seeds: int) -> Tensor:
        """The mean loss of some samples; its gradient is in the state's memory."""
        inputs, targets = self._batch(self._train, enough(indices, normalises=self._normalises), epoch)
        seed_all(self._seed, *seeds, device=self._device)
        self._state.zero_gradients()
        with self._precision.autocast():
            loss: Tensor = self._task.loss(self._call(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._task.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._task.clip_norm)
        return loss.detach().double()

    def _batch(self, dataset: Any, indices: NDArray[np.int64], epoch: int) -> tuple[Any, Any]:
        inputs, targets = split_batch(collect(dataset, indices, self._seed, epoch))
        prepare = self._precision.prepare
        return prepare(to_device(inputs, self._device)), prepare(to_device(targets, self._device))

    def _call(self, inputs: Any) -> Any:
        if isinstance(inputs, dict):
            return self._model(**inputs)
        return self._model(*inputs) if isinstance(inputs, tuple | list) else self._model(inputs)

    def _sums(self, indices: NDArray[np.int64]) -> Tensor:
        """Sum of losses and number of right answers."""
        inputs, targets = self._batch(self._validation, indices, 0)
        with self._precision.autocast():
            outputs = self._call(inputs)
            loss = self._task.loss(outputs, targets)
        return torch.stack((loss.double() * len(indices), self._correct(outputs, targets).double())).cpu()

    def _correct(self, outputs: Any, targets: Any) -> Tensor:
        if self._task.correct is None:
            return torch.zeros((), device=self._device)
        if callable(self._task.correct):
            return torch.as_tensor(self._task.correct(outputs, targets), device=self._device).detach()
        right: Tensor = (outputs.argmax(1) == targets).sum()
        return right
