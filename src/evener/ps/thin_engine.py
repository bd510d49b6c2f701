"""The engine of thin tasks: gradients and local steps on leased samples with NumPy alone.

It takes the samples in the order in which the PyTorch engine does, and its states are laid out alike: both serve one
run side by side. Gradients are written by the backward pass into one flat array, and leave it in one copy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evener import autodiff as ad
from evener.data.sampler import permutation
from evener.errors import InvalidInput, require
from evener.ps.engine import Workshop, enough
from evener.ps.pace import Pace
from evener.sync.flat import Flat
from evener.sync.layout import Layout, layout_of
from evener.sync.messages import Lease
from evener.sync.samples import positions
from evener.task import ThinTask

_WARM_UP = 1


class ThinEngine:
    """A thin task's model and data.

    Args:
        task: to be computed.
        workshop: what else the engine is made from.

    Raises:
        InvalidInput: data or model are not those of the job.
    """

    def __init__(self, task: ThinTask, workshop: Workshop) -> None:
        self._task, self._job = task, workshop.job
        self._between_steps = workshop.between_steps
        self._train = task.train_data()
        is_validated = workshop.job.num_validation > 0
        self._validation = task.validation_data() if task.validation_data and is_validated else None
        self._check_data()
        self._model = thin_model(task, self._seed, self._job.precision)
        if layout_of_thin_model(self._model) != workshop.job.layout:
            raise InvalidInput("the thin task's model has other arrays than the one with which the run was submitted")
        self._optimizer = task.optimizer(self._model.parameters())
        self._peak_rates = [group["lr"] for group in self._optimizer.param_groups]
        self._buffers = dict(self._model.named_buffers())
        self._memory, self._kept = ad.Arena(), Flat(workshop.job.layout)
        self._views: dict[int, tuple[Flat, Mapping[str, NDArray[Any]]]] = {}
        self._pace = Pace(workshop.speed)
        self._order = lru_cache(maxsize=2)(self._order_of)

    @property
    def layout(self) -> Layout:
        """See `Engine`."""
        return self._job.layout

    def load(self, weights: Flat) -> None:
        """See `Engine`."""
        self._optimizer.arena.load(_only(weights.parameters))
        for name, view in self._views_of(weights).items():
            self._buffers[name].copy_(view)

    def gradient(self, lease: Lease, into: Flat) -> float:
        """See `Engine`."""
        self._model.train()
        with self._pace.computing():
            loss = self._backward(self._indices(lease), lease.number)
            np.copyto(_only(into.parameters), self._optimizer.arena.gradients)
            self._save_buffers(into)
        return loss

    def local_steps(self, lease: Lease, into: Flat) -> float:
        """See `Engine`."""
        self._model.train()
        indices, steps, batch = self._indices(lease), self._steps(lease), self._job.agreement.batch
        total = 0.0
        for number in range(lease.num_steps):
            own = indices[number * batch : (number + 1) * batch]
            with self._pace.computing():
                total += self._backward(own, lease.number, number) * len(own)
                self._set_rate(int(steps[number * batch]))
                self._optimizer.step()
            self._between_steps()
        self._save(into)
        return total / len(indices)

    def unit_seconds(self) -> float:
        """See `NodeEngine`."""
        batch = min(self._job.agreement.batch, len(self._train[0]))
        self._save(self._kept)
        self._model.train()
        for _ in range(_WARM_UP + 1):
            begun = time.perf_counter()
            with self._pace.computing():
                self._backward(np.arange(batch))
            seconds = time.perf_counter() - begun
        self.load(self._kept)
        return seconds / batch

    def assess(self, weights: Flat, first: int, count: int) -> tuple[float, float]:
        """See `NodeEngine`."""
        self._save(self._kept)
        self.load(weights)
        self._model.eval()
        loss, correct, batch = 0.0, 0.0, self._job.agreement.batch
        for start in range(first, first + count, batch):
            with self._pace.computing():
                sums = self._sums(slice(start, min(start + batch, first + count)))
            loss, correct = loss + sums[0], correct + sums[1]
            self._between_steps()
        self.load(self._kept)
        return loss, correct

    def close(self) -> None:
        """See `NodeEngine`."""
        self._views.clear()

    @property
    def _seed(self) -> int:
        return self._job.workload.seed

    def _check_data(self) -> None:
        for what, arrays, wanted in (
            ("training", self._train, self._job.workload.num_samples),
            ("validation", self._validation, self._job.num_validation),
        ):
            counts = {len(array) for array in arrays} if arrays is not None else {0}
            if counts != {wanted}:
                here = " and ".join(map(str, sorted(counts)))
                raise InvalidInput(f"there are {here} {what} samples here and {wanted} where the run was submitted")

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        count = self._job.workload.num_samples
        assert count is not None
        return permutation(count, self._seed, epoch)

    def _indices(self, lease: Lease) -> NDArray[np.int64]:
        """The samples of a lease."""
        return self._order(lease.samples.epoch)[positions(lease.samples)]

    def _steps(self, lease: Lease) -> NDArray[np.int64]:
        """For each sample the step, from 0, in which one process would learn from it: that step's rate is used."""
        return lease.samples.epoch * self._steps_an_epoch + positions(lease.samples) // self._job.agreement.batch

    @property
    def _steps_an_epoch(self) -> int:
        count = self._job.workload.num_samples
        assert count is not None
        return -(-count // self._job.agreement.batch)

    def _set_rate(self, step: int) -> None:
        if self._task.rate is None:
            return
        share = self._task.rate(step, (self._job.workload.num_epochs or 1) * self._steps_an_epoch)
        for group, peak in zip(self._optimizer.param_groups, self._peak_rates, strict=True):
            group["lr"] = share * peak

    def _backward(self, indices: NDArray[np.int64], *seeds: int) -> float:
        """The mean loss of some samples; its gradient is in the optimiser's arena."""
        ad.manual_seed(int(np.random.SeedSequence((self._seed, *seeds)).generate_state(1)[0]))
        with self._memory:
            self._optimizer.zero_grad()
            indices = enough(indices, normalises=bool(self._buffers))
            inputs, targets = (ad.from_numpy(array[indices]) for array in self._train)
            loss = self._task.loss(self._model(inputs), targets)
            loss.backward()
            return float(loss.item())

    def _sums(self, part: slice) -> tuple[float, float]:
        """Sum of losses and number of right answers of some samples for validation."""
        assert self._validation is not None
        count = part.stop - part.start
        with self._memory, ad.no_grad():
            inputs, targets = (ad.from_numpy(array[part]) for array in self._validation)
            outputs = self._model(inputs)
            loss = float(self._task.loss(outputs, targets).item()) * count
            if not self._task.has_accuracy:
                return loss, 0.0
            return loss, float((outputs.numpy().argmax(1) == self._validation[1][part]).sum())

    def _save(self, into: Flat) -> None:
        np.copyto(_only(into.parameters), self._optimizer.arena.values)
        self._save_buffers(into)

    def _save_buffers(self, into: Flat) -> None:
        for name, view in self._views_of(into).items():
            np.copyto(view, self._buffers[name].numpy())

    def _views_of(self, flat: Flat) -> Mapping[str, NDArray[Any]]:
        """Where in `flat` the buffers lie; the few states that come and go are remembered."""
        if not self._buffers:
            return {}
        known = self._views.get(id(flat))
        if known is None or known[0] is not flat:
            views = flat.views()
            known = self._views[id(flat)] = flat, {name: views[name] for name in self._buffers}
        return known[1]


def thin_model(task: ThinTask, seed: int, precision: str) -> ad.nn.Module:
    """The task's model with the first weights of `seed`. Raises InvalidInput: NumPy has no such precision."""
    require(precision in ("fp32", "fp64"), "--precision", precision, "fp32 or fp64 without PyTorch")
    ad.manual_seed(seed)
    model = task.model()
    return model.double() if precision == "fp64" else model


def layout_of_thin_model(model: ad.nn.Module) -> Layout:
    """How the model's state lies in memory: parameters, then buffers, in the order of the model."""
    buffers = dict(model.named_buffers())
    named = dict(model.named_parameters()) | buffers
    return layout_of({name: tensor.detach().numpy() for name, tensor in named.items()}, statistics=buffers)


def _only(sections: tuple[Any, ...]) -> Any:
    """The parameters of a thin model, which are of one type."""
    (parameters,) = sections
    return parameters
