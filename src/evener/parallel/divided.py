"""Filter, channel and spatial parallelism, and their hybrids with data parallelism, as the training loop sees them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evener.errors import InvalidInput
from evener.parallel.gradient_sums import GradientSums
from evener.parallel.parallel_model import Criterion
from evener.parallel.process_mesh import ProcessMesh
from evener.parallel.sharded import ShardedModel


class DividedModel:
    """A model whose layers the ranks of a replica divide.

    Args:
        model: whole, on this rank's device.
        mesh: of this rank.
        example: inputs of a micro-batch of this replica.
        criterion: how the loss is computed.
        recompute: whether backward keeps little of the forward pass, and computes the rest again.
        compiles: whether what lies between exchanges is compiled.
    """

    rng_stream = 0
    """What is random is drawn for the samples of all replicas, as in one process."""

    def __init__(
        self,
        model: nn.Module,
        mesh: ProcessMesh,
        example: Any,
        criterion: Criterion,
        recompute: bool = False,
        compiles: bool = False,
    ) -> None:
        self.group, self.replica, self.is_reporter = mesh.world, mesh.index, mesh.group.is_leader
        self._criterion = criterion
        self._model = ShardedModel(model, mesh, self.tensors(example), recompute, compiles)
        self._sums = GradientSums(self._model)

    @property
    def model(self) -> ShardedModel:
        """This rank's part."""
        return self._model

    @staticmethod
    def tensors(inputs: Any) -> Sequence[Tensor]:
        """`inputs` as the tensors that the model takes in order. Raises InvalidInput if they are no such."""
        if isinstance(inputs, Tensor):
            return [inputs]
        if isinstance(inputs, tuple | list) and all(isinstance(x, Tensor) for x in inputs):
            return inputs
        raise InvalidInput(f"layers are divided of models that take tensors in order, not a {type(inputs).__name__}")

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of this rank's part."""
        return self._model.part.parameters()

    def train(self, mode: bool = True) -> nn.Module:
        """From now on the model trains, or evaluates."""
        return self._model.train(mode)

    def add_gradients(self, inputs: Any, targets: Any, *, samples: int, total: int, is_last: bool) -> Tensor:
        """As `ParallelModel`; every rank computes the loss of all samples of its replica."""
        travelling = nullcontext() if is_last else self._sums.accumulating()
        present = nullcontext() if samples else self._model.without_samples()
        with travelling, present:
            with self._criterion.autocast():
                outputs = self._model(*self.tensors(inputs))
                loss = self._criterion.loss(outputs, targets) * (samples / total)
            torch.autograd.backward(self._criterion.scale(loss))
        return loss.detach().double() * self.is_reporter

    @torch.no_grad()
    def predict(self, inputs: Any) -> Any:
        """The outputs; all ranks of the replica have to call this, the first one gets them."""
        with self._criterion.autocast():
            outputs = self._model(*self.tensors(inputs))
        return outputs if self.is_reporter else None

    def clip(self, largest: float) -> None:
        """As `ParallelModel`."""
        self._sums.clip(largest)

    def gather_weights(self) -> dict[str, Tensor]:
        """As `ParallelModel`."""
        weights = self._model.gather_weights() if self.replica == 0 else {}
        return weights if self.group.is_leader else {}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """As `ParallelModel`."""
        self._model.load_weights(weights)

    def gather_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """As `ParallelModel`."""
        return self._model.optimizer_state.gather(optimizer) if self.replica == 0 else {}

    def load_optimizer(self, optimizer: Optimizer, whole: Mapping[str, Any]) -> None:
        """As `ParallelModel`."""
        self._model.optimizer_state.load(optimizer, whole)
