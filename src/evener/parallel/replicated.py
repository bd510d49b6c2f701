"""Data parallelism as the training loop sees it: every rank is a replica by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evener.comm.group import Group
from evener.errors import InvalidInput
from evener.parallel.data import DataParallel
from evener.parallel.normalisation import GroupBatchNorm
from evener.parallel.parallel_model import Criterion, call


class ReplicatedModel:
    """A model of which every rank has the whole.

    Args:
        model: on the group's device; its BatchNorms already synchronised.
        group: the ranks.
        criterion: how the loss is computed.
        compiled: whether it is compiled, all but its exchanges of statistics.
    """

    is_reporter = True

    def __init__(self, model: nn.Module, group: Group, criterion: Criterion, compiled: bool = False) -> None:
        self.group, self.replica, self.rng_stream = group, group.rank, group.rank
        self._model, self._criterion = model, criterion
        self._parallel = DataParallel(model, group, forward=_compiled(model) if compiled else None)

    def parameters(self) -> Iterator[nn.Parameter]:
        """All of the model."""
        return self._model.parameters()

    def train(self, mode: bool = True) -> nn.Module:
        """From now on the model trains, or evaluates."""
        return self._model.train(mode)

    def add_gradients(self, inputs: Any, targets: Any, *, samples: int, total: int, is_last: bool) -> Tensor:
        """As `ParallelModel`; gradients travel with the last micro-batch."""
        travelling = nullcontext() if is_last else self._parallel.accumulating()
        present = nullcontext() if samples else self._parallel.without_samples()
        with travelling, present:
            with self._criterion.autocast():
                loss = self._criterion.loss(self._parallel(inputs), targets) * (samples / total)
            torch.autograd.backward(self._criterion.scale(loss))
        return loss.detach().double()

    @torch.no_grad()
    def predict(self, inputs: Any) -> Any:
        """The outputs; ranks compute them independently of each other."""
        with self._criterion.autocast():
            return call(self._model, inputs)

    def clip(self, largest: float) -> None:
        """As `ParallelModel`; all ranks have the same gradients."""
        nn.utils.clip_grad_norm_(self._model.parameters(), largest)

    def gather_weights(self) -> dict[str, Tensor]:
        """As `ParallelModel`."""
        return self._model.state_dict() if self.group.is_leader else {}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """As `ParallelModel`."""
        try:
            self._model.load_state_dict(weights)
        except RuntimeError as error:
            raise InvalidInput(" ".join(str(error).split())) from error

    def gather_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """As `ParallelModel`."""
        return optimizer.state_dict() if self.group.is_leader else {}

    def load_optimizer(self, optimizer: Optimizer, whole: Mapping[str, Any]) -> None:
        """As `ParallelModel`."""
        optimizer.load_state_dict(dict(whole))


def _compiled(model: nn.Module) -> nn.Module:
    """`model`, compiled; the compiler is loaded here and not with this file, as it takes longer than all the rest."""
    for module in model.modules():
        if isinstance(module, GroupBatchNorm):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign,no-untyped-call]
    return cast(nn.Module, torch.compile(model))
