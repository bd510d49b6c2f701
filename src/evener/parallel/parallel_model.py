"""The interface between a training loop and a model that several ranks train together.

    ReplicatedModel    samples are divided: every rank has the whole model
    DividedModel       every layer is divided: by filters, channels or rows of images
    StagedModel        layers are cut into the stages of a pipeline

Ranks that hold one model together are a *replica* of it: they get the same samples, and one of them reports.
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
from evener.records.task import Task
from evener.system import accelerators


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """A loss and its context and scale.

    Attributes:
        loss: Maps (outputs, targets) to the mean over the samples, a scalar.
        autocast: Makes the context in which outputs and loss are computed.
        scale: Scales a loss before its backward pass.
    """

    loss: Callable[[Any, Any], Tensor]
    autocast: Callable[[], AbstractContextManager[Any]]
    scale: Callable[[Tensor], Tensor]

    def backward(self, model: Callable[[Any], Any], inputs: Any, targets: Any, share: float) -> Tensor:
        """Run forward and backward; return the loss times `share`, the samples' part of the step; see `wide`."""
        with self.autocast():
            loss = require_scalar(self.loss(model(inputs), targets)) * share
        with noting("loss, in its backward pass"):
            torch.autograd.backward(self.scale(loss))
        return accelerators.wide(loss.detach())


def require_scalar(loss: Any) -> Tensor:
    """Return `loss`, which a task's loss function returned. Raises InvalidInput if it is not a single number."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise InvalidInput(
                "the task's loss depends on no trainable weight: it is detached from the model's outputs, or "
                "all weights are frozen (requires_grad)"
            )
        return loss
    kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    raise InvalidInput(f"the task's loss returns {kind}, not a single number: return the mean over the samples")


def count_correct(task: Task, outputs: Any, targets: Any) -> Tensor:
    """Return the number of correct outputs, as `task.correct` counts them; a scalar, 0 if it counts nothing.

    Raises:
        InvalidInput: `task.correct` does not return a single number.
    """
    if task.correct is None:
        return torch.zeros(())
    if not callable(task.correct):
        right: Tensor = (outputs.argmax(1) == targets).sum()
        return right
    number = torch.as_tensor(task.correct(outputs, targets)).detach()
    if number.numel() != 1:
        shape = tuple(number.shape)
        raise InvalidInput(
            f"the task's correct returns a tensor of shape {shape}, not one number: add up what is right"
        )
    return number.reshape(())


class ParallelModel(Protocol):
    """A model that several ranks hold. Every rank of the run makes the same calls in the same order.

    Attributes:
        group: All ranks of the run.
        replica: Index of the replica that this rank belongs to.
        rng_stream: Ranks with the same number draw the same random numbers; ranks with different numbers do not.
        is_reporter: Whether this rank's losses and outputs count; true on one rank of each replica.
    """

    group: Group
    replica: int
    rng_stream: int
    is_reporter: bool

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over this rank's parameters."""

    def train(self, mode: bool = True) -> object:
        """Set training or evaluation mode."""

    def add_gradients(self, inputs: Any, targets: Any, *, samples: int, total: int, is_last: bool) -> Tensor:
        """Run forward and backward on a micro-batch of this replica.

        Gradients are complete after the last micro-batch of a step.

        Args:
            inputs: Inputs of the micro-batch, or one stand-in sample that does not count.
            targets: Targets of the micro-batch or of the stand-in sample.
            samples: Number of samples in the micro-batch; zero for a stand-in.
            total: Samples of the whole step, over all replicas and micro-batches.
            is_last: Whether this is the step's last micro-batch.

        Returns:
            This rank's part of the mean loss of the step, in its device's widest type; zero if it does not report.
        """

    def predict(self, inputs: Any) -> Any:
        """Return the outputs for inputs of this replica, without gradients; None on ranks that do not report."""

    def clip(self, largest: float) -> None:
        """Scale all gradients so that the norm of the whole model's gradients is at most `largest`."""

    def gather_weights(self) -> dict[str, Tensor]:
        """Return the state dict of the whole model on the first rank, and an empty one elsewhere."""

    def own_weights(self) -> tuple[dict[str, Tensor], dict[str, Piece]]:
        """Return this rank's part of that state dict, and by name the piece that each partial tensor is."""

    def buffers(self) -> Iterator[Tensor]:
        """Iterate over this rank's tensors other than parameters that a step changes, such as running statistics."""

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load this rank's part from the state dict of a whole model. Raises InvalidInput if it does not fit."""

    def held(self) -> HeldModel:
        """Describe all parameters, and this rank's part of them, for the optimizer. All ranks call this."""
