"""A task of PyTorch for `sync_check`: one process is plain PyTorch, with nothing of Evener but the order of samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from evener.data.loader import collect, random_state_kept, seed_all, split_batch
from evener.parallel.gradient_hooks import copied
from evener.ps.node.torch_backend import TorchBackend, optimizer_of
from evener.ps.node.torch_state import shared_state
from evener.records.profile import Precision
from evener.records.task import Task
from evener.system.global_draws import global_states
from evener.tracer.nested import call
from evener.training.array_differences import Arrays, StepArrays, felt
from evener.training.context import Arithmetic
from evener.training.draws import SameDraws
from evener.training.loss_parts import off_in_parts, off_over_data, spread
from evener.training.narrowing import Narrowing


class TorchProbe:
    """See `TaskProbe`.

    Args:
        submitted: backend of the task, which stays as it is.
        task: to be trained.
        seed: of the run.
        precision: of the check.
        is_asked: whether the run computes in it, too; else what the task makes is made in float64 where it can be.
    """

    def __init__(self, submitted: TorchBackend, task: Task, seed: int, precision: Precision, *, is_asked: bool) -> None:
        self._submitted, self._task, self._seed = submitted, task, seed
        self._arithmetic = Arithmetic(precision, torch.device("cpu"))
        self._default = None if is_asked or precision != "fp64" else torch.float64
        self._narrowing: Any = Narrowing()
        self._draws: SameDraws | None = None
        self._usual = torch.get_default_dtype()

    @property
    def tolerance(self) -> float:
        """See `TaskProbe`."""
        return float(self._narrowing.tolerance)

    def backend(self) -> TorchBackend:
        """See `TaskProbe`."""
        return self._submitted.twin(self._arithmetic, self._load)

    def batch_norm(self) -> str:
        """See `TaskProbe`."""
        for name, module in self._submitted.model.train().named_modules():
            if isinstance(module, _BatchNorm) and module.training:
                return f"{f'layer {name}' if name else 'the model'} ({type(module).__name__})"
        return ""

    def draws_for_all(self, indices: NDArray[np.int64]) -> bool:
        """See `TaskProbe`."""
        shapes: list[set[tuple[int, ...]]] = []
        for chosen in (indices, indices[:-1]):
            model, draws, (inputs, targets) = self._model().train(), SameDraws(), self._batch(chosen)
            with self._drawn(draws), torch.no_grad(), self._arithmetic.autocast():
                before = global_states()
                self._task.loss(call(model, inputs), targets)
                if global_states() != before:
                    return True
            shapes.append(draws.shapes)
        return bool(shapes[0] & shapes[1])

    def whole(self, batches: Sequence[NDArray[np.int64]], num_steps: int) -> list[StepArrays]:
        """See `TaskProbe`."""
        model = self._model().train()
        optimizer = optimizer_of(self._task, model.parameters())
        scheduler = self._task.scheduler(optimizer, num_steps) if self._task.scheduler else None
        steps = []
        for number, indices in enumerate(batches):
            inputs, targets = self._batch(indices)
            with self.drawing(), self._narrowing, self._arithmetic.autocast():
                seed_all(self._seed, number)
                loss = self._task.loss(call(model, inputs), targets)
                loss.backward()  # type: ignore[no-untyped-call]
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            gradients = _arrays(
                {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}
            )
            if (bound := felt(self._task.clip_norm)) is not None:
                nn.utils.clip_grad_norm_(model.parameters(), bound)
            optimizer.step()
            model.zero_grad()
            if scheduler is not None:
                scheduler.step()
            steps.append(StepArrays(float(loss.detach()), gradients, _arrays(shared_state(model))))
        return steps

    def off_in_parts(self, indices: NDArray[np.int64]) -> float:
        """See `TaskProbe`."""
        model, (_, targets) = self._model().eval(), self._batch(indices)
        outputs = []
        with torch.no_grad(), self._arithmetic.autocast():
            for chosen in (indices, indices[:-1]):
                with self.drawing():
                    outputs.append(call(model, self._batch(chosen)[0]))
            loss, others = self._task.loss, self._batch(spread(self._submitted.num_samples))[1]
            off = off_in_parts(loss, outputs[0], targets, outputs[1], self._drawing_loss)
            return max(off, off_over_data(loss, outputs[0], targets, outputs[1], others, self._drawing_loss))

    def _drawing_loss(self, first: int, last: int) -> AbstractContextManager[None]:
        return self._drawn(SameDraws((first, last - first)))

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """See `TaskProbe`."""
        with self._drawn(SameDraws()):
            yield

    @contextmanager
    def _drawn(self, draws: Any) -> Iterator[None]:
        before, around = torch.get_default_dtype(), self._draws
        with random_state_kept(), draws:
            self._draws = draws
            torch.set_default_dtype(self._default or before)
            try:
                yield
            finally:
                torch.set_default_dtype(before)
                self._draws = around

    def _model(self) -> nn.Module:
        return self._arithmetic.prepare_model(copied(self._submitted.model))

    def _batch(self, indices: NDArray[np.int64]) -> tuple[Any, Any]:
        inputs, targets = split_batch(self._load(self._submitted.train_data, indices, self._seed, 0))
        return self._arithmetic.prepare(inputs), self._arithmetic.prepare(targets)

    def _load(self, *arguments: Any) -> Any:
        """Load a batch as in a run: what a data set draws belongs to the sample, not to the part of a batch."""
        if (draws := self._draws) is None:
            return collect(*arguments)
        within = torch.get_default_dtype()
        torch.set_default_dtype(self._usual)
        draws.is_paused = True
        try:
            return collect(*arguments)
        finally:
            draws.is_paused = False
            torch.set_default_dtype(within)


def _arrays(tensors: dict[str, Tensor]) -> Arrays:
    """Return float64 copies of the tensors."""
    return {name: np.array(tensor.detach().to_dense().double().numpy()) for name, tensor in tensors.items()}
