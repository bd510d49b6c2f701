"""What a training loop asks of a model that ranks train together, whatever is divided among them.

    ReplicatedModel    samples are divided: every rank has the whole model
    DividedModel       layers are divided: by filters, channels or rows of images
    StagedModel        the model is divided: into stages of a pipeline

Ranks that hold one model together are a *replica* of it: they are given the same samples, and one of them reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from evener.comm.group import Group
from evener.oracle.division.pieces import Piece
from evener.parallel.optimizer import HeldModel
from evener.records.errors import InvalidInput, noting


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """How a loss is computed.

    Attributes:
        loss: (outputs, targets) -> mean over the samples, a scalar.
        autocast: makes a context in which outputs and loss are computed.
        scale: of a loss, before its backward pass.
    """

    loss: Callable[[Any, Any], Tensor]
    autocast: Callable[[], AbstractContextManager[Any]]
    scale: Callable[[Tensor], Tensor]

    def backward(self, model: Callable[[Any], Any], inputs: Any, targets: Any, share: float) -> Tensor:
        """Forward and backward of samples whose mean loss counts `share`; that part of the step's loss, float64."""
        with self.autocast():
            loss = require_scalar(self.loss(model(inputs), targets)) * share
        with noting("loss, in its backward pass"):
            torch.autograd.backward(self.scale(loss))
        return loss.detach().double()


def require_scalar(loss: Any) -> Tensor:
    """`loss`, which is what a task's loss returned. Raises InvalidInput: it is not one number."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise InvalidInput(
                "the task's loss depends on no weight that can be trained: it is detached from the model's outputs, or "
                "all weights are frozen (requires_grad)"
            )
        return loss
    given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    raise InvalidInput(f"the task's loss returns {given}, not one number: have it return the mean over the samples")


class ParallelModel(Protocol):
    """A model of several ranks. Every rank of the run makes the same calls in the same order.

    Attributes:
        group: all ranks of the run.
        replica: that this rank belongs to, from 0.
        rng_stream: ranks with the same number draw the same random numbers, others do not.
        is_reporter: whether this rank's losses and outputs count: one rank's of each replica.
    """

    group: Group
    replica: int
    rng_stream: int
    is_reporter: bool

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's."""

    def train(self, mode: bool = True) -> object:
        """From now on the model trains, or evaluates."""

    def add_gradients(self, inputs: Any, targets: Any, *, samples: int, total: int, is_last: bool) -> Tensor:
        """Forward and backward of a micro-batch of this replica; gradients are complete after the last one of a step.

        Args:
            inputs: of the micro-batch, or one stand-in sample that counts for nothing.
            targets: likewise.
            samples: of the micro-batch; zero for a stand-in.
            total: samples of the whole step, over all replicas and micro-batches.
            is_last: whether the step ends with it.

        Returns:
            This rank's part of the mean loss of the step, float64; zero where it does not report.
        """

    def predict(self, inputs: Any) -> Any:
        """The model's outputs for inputs of this replica, without gradients, on the reporting rank; else None."""

    def clip(self, largest: float) -> None:
        """Shrink all gradients, if need be, so that those of the whole model have a norm of `largest`."""

    def gather_weights(self) -> dict[str, Tensor]:
        """The state dict of the whole model on the first rank of all, else an empty one."""

    def own_weights(self) -> tuple[dict[str, Tensor], dict[str, Piece]]:
        """What this rank has of that state dict; and, by name, which part of their wholes those are that are none."""

    def buffers(self) -> Iterator[Tensor]:
        """This rank's tensors that a step changes besides the parameters, such as running statistics."""

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take what this rank holds from the state dict of a whole model. Raises InvalidInput if it does not fit."""

    def held(self) -> HeldModel:
        """All parameters of the model, and what of them this rank has, for their optimiser; all ranks call this."""
