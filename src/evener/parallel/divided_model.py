"""A model with sharded layers, as the training loop sees it."""

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
from evener.parallel.refusals import tensors_in_order


class DividedModel:
    """Train a model whose layers the ranks of a replica divide. The arguments are those of `ShardedModel`."""

    rng_stream = 0
    """Random numbers are drawn for the samples of all replicas, as in a single process."""

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
        """Return the parameters of this rank's part."""
        return self.model.part.parameters()

    def train(self, mode: bool = True) -> nn.Module:
        """Set training or evaluation mode."""
        return self.model.train(mode)

    def add_gradients(self, inputs: Any, targets: Any, *, samples: int, total: int, is_last: bool) -> Tensor:
        """Run forward and backward; every rank computes the loss of all samples of its replica."""
        travelling = nullcontext() if is_last else self.model.sums.accumulating()
        present = nullcontext() if samples else self.model.without_samples()
        with travelling, present:
            loss = self._criterion.backward(self._outputs, inputs, targets, samples / total) * self.is_reporter
        if is_last:
            self.model.hooks.run(self.model.part.named_parameters())
        return loss

    @torch.no_grad()
    def predict(self, inputs: Any) -> Any:
        """Return the outputs on the replica's first rank, else None. All ranks of the replica call this."""
        with self._criterion.autocast():
            outputs = self._outputs(inputs)
        return outputs if self.is_reporter else None

    def _outputs(self, inputs: Any) -> Any:
        return self.model(*tensors_in_order(inputs))

    def clip(self, largest: float) -> None:
        """Scale all gradients of the model to a norm of at most `largest`."""
        self.model.sums.clip(largest)

    def gather_weights(self) -> dict[str, Tensor]:
        """Return the state dict of the whole model on the first rank, and an empty one elsewhere."""
        weights = self.model.gather_weights() if self.replica == 0 else {}
        return weights if self.group.is_leader else {}

    def own_weights(self) -> tuple[dict[str, Tensor], dict[str, Piece]]:
        """Return this rank's state dict, and by name the piece that each partial tensor is."""
        model = self.model
        return model.part.state_dict(), pieces_of(model.state_shards(), model.mesh.group.rank)

    def buffers(self) -> Iterator[Tensor]:
        """Return the buffers of this rank's part."""
        return self.model.part.buffers()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load this rank's part from the state dict of a whole model."""
        self.model.load_weights(weights)

    def held(self) -> HeldModel:
        """Describe the parameters as the ranks of the replica have them."""
        return self.model.held()
