"""A divided model as the training loop sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from evener.oracle.division.pieces import Piece
from evener.parallel.divided import ShardedModel
from evener.parallel.full_state import pieces_of
from evener.parallel.optimizer import HeldModel
from evener.parallel.parallel_model import Criterion
from evener.parallel.process_mesh import ProcessMesh
from evener.parallel.refusals import (
    tensors_in_order,
)


class DividedModel:
    """A model whose layers the ranks of a replica divide; the arguments are those of `ShardedModel`."""

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
        self.model = ShardedModel(model, mesh, tensors_in_order(example), recompute, compiles)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of this rank's part."""
        return self.model.part.parameters()

    def train(self, mode: bool = True) -> nn.Module:
        """From now on the model trains, or evaluates."""
        return self.model.train(mode)

    def add_gradients(self, inputs: Any, targets: Any, *, samples: int, total: int, is_last: bool) -> Tensor:
        """As `ParallelModel`; every rank computes the loss of all samples of its replica."""
        travelling = nullcontext() if is_last else self.model.sums.accumulating()
        present = nullcontext() if samples else self.model.without_samples()
        with travelling, present:
            loss = self._criterion.backward(self._outputs, inputs, targets, samples / total) * self.is_reporter
        if is_last:
            self.model.hooks.run(self.model.part.named_parameters())
        return loss

    @torch.no_grad()
    def predict(self, inputs: Any) -> Any:
        """The outputs; all ranks of the replica have to call this, the first one gets them."""
        with self._criterion.autocast():
            outputs = self._outputs(inputs)
        return outputs if self.is_reporter else None

    def _outputs(self, inputs: Any) -> Any:
        return self.model(*tensors_in_order(inputs))

    def clip(self, largest: float) -> None:
        """As `ParallelModel`."""
        self.model.sums.clip(largest)

    def gather_weights(self) -> dict[str, Tensor]:
        """As `ParallelModel`."""
        weights = self.model.gather_weights() if self.replica == 0 else {}
        return weights if self.group.is_leader else {}

    def own_weights(self) -> tuple[dict[str, Tensor], dict[str, Piece]]:
        """As `ParallelModel`."""
        model = self.model
        return model.part.state_dict(), pieces_of(model.state_shards(), model.mesh.group.rank)

    def buffers(self) -> Iterator[Tensor]:
        """As `ParallelModel`."""
        return self.model.part.buffers()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """As `ParallelModel`."""
        self.model.load_weights(weights)

    def held(self) -> HeldModel:
        """As `ParallelModel`."""
        return self.model.held()
