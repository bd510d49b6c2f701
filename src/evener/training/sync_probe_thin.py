"""A thin task for `sync_check`: one process is the thin engine with the whole batch. PyTorch is not needed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evener import autodiff as ad
from evener.agreements.layout import Flat
from evener.ps.node.thin_backend import ThinBackend
from evener.records.profile import Precision
from evener.records.task import ThinTask
from evener.system.global_draws import global_states
from evener.training.array_differences import StepArrays

_MIN_SAMPLES = 2
"""Samples of a part, when a loss is cut: of a single one some losses are not defined."""


class ThinProbe:
    """See `TaskProbe`.

    Args:
        submitted: backend of the task, which stays as it is.
        task: to be trained.
        seed: of the run.
        precision: of the check.

    Attributes:
        tolerance: arrays of a thin task stay in the precision that they have.
    """

    tolerance = 0.0

    def __init__(self, submitted: ThinBackend, task: ThinTask, seed: int, precision: Precision) -> None:
        self._submitted, self._task, self._seed, self._precision = submitted, task, seed, precision

    def backend(self) -> ThinBackend:
        """See `TaskProbe`."""
        return self._submitted.twin(self._precision)

    def batch_norm(self) -> str:
        """See `TaskProbe`."""
        for name, module in self._submitted.model.train().named_modules():
            if isinstance(module, ad.nn.BatchNorm2d) and module.training:
                return f"{f'layer {name}' if name else 'the model'} ({type(module).__name__})"
        return ""

    def draws_for_all(self, indices: NDArray[np.int64]) -> bool:
        """See `TaskProbe`: the thin engine draws for its samples."""
        backend = self.backend()
        inputs, targets = backend.batch(indices)
        before = global_states()
        with ad.no_grad(), self.drawing():
            self._task.loss(backend.model.train()(inputs), targets)
        return global_states() != before

    def whole(self, batches: Sequence[NDArray[np.int64]], num_steps: int) -> list[StepArrays]:
        """See `TaskProbe`."""
        backend, steps = self.backend(), []
        gradients, state = Flat(backend.layout), Flat(backend.layout)
        trained = [entry.name for entry in backend.layout.entries if entry.kind == "parameter"]
        backend.prepare(num_steps)
        backend.set_training(True)
        for number, indices in enumerate(batches):
            with self.drawing():
                loss = backend.backward(indices, 0, (self._seed, number))
            backend.save_gradients(gradients)
            backend.step(number)
            backend.save(state)
            gradient_arrays = {name: gradients.views()[name].astype(np.float64) for name in trained}
            state_arrays = {name: array.astype(np.float64) for name, array in state.views().items()}
            steps.append(StepArrays(loss, gradient_arrays, state_arrays))
        return steps

    def off_in_parts(self, indices: NDArray[np.int64]) -> float:
        """See `TaskProbe`."""
        backend, count = self.backend(), len(indices)
        inputs, targets = backend.batch(indices)
        with ad.no_grad(), self.drawing():
            outputs = backend.model.eval()(inputs)
        if not isinstance(outputs, ad.Tensor) or outputs.shape[:1] != (count,):
            return 0.0
        with ad.no_grad():
            whole, worst = self._loss(outputs, targets), 0.0
            for cut in range(_MIN_SAMPLES, count - _MIN_SAMPLES + 1):
                first, second = self._loss(outputs[:cut], targets[:cut]), self._loss(outputs[cut:], targets[cut:])
                together = (first * cut + second * (count - cut)) / count
                worst = max(worst, abs(together - whole) / max(abs(whole), 1e-6))
        return worst

    def drawing(self) -> AbstractContextManager[Any]:
        """See `TaskProbe`."""
        return ad.same_draws()

    def _loss(self, outputs: ad.Tensor, targets: ad.Tensor) -> float:
        with self.drawing():
            return float(self._task.loss(outputs, targets).item())
