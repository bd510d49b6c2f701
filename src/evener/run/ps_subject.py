"""What is trained on the star plane, whichever engine says it: sizes, first weights, and the server's optimiser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from evener.run.ps_engines import is_thin
from evener.sync.agreement import Outer
from evener.sync.flat import Flat

if TYPE_CHECKING:
    from evener.run.order import Order  # imports PyTorch
    from evener.run.settings import Settings


class Subject(NamedTuple):
    """A task as the master has to know it.

    Attributes:
        name: of the task.
        settings: of the run.
        num_samples: for training.
        num_validation: for validation; 0 for none.
        has_accuracy: whether the task says how many answers are right.
        clips: whether the task bounds the norm of the gradient.
        weights: to begin with, and how they lie in memory.
        outer: gives the server's optimiser that does in so many steps what the task's would. Raises InvalidInput.
        keep: writes a safetensors file of the final weights to a path.
    """

    name: str
    settings: Settings
    num_samples: int
    num_validation: int
    has_accuracy: bool
    clips: bool
    weights: Flat
    outer: Callable[[int], Outer]
    keep: Callable[[bytes, Path], None]


def load_subject(order: Order) -> Subject:
    """The task that was asked for, said by PyTorch, or by the thin engine where PyTorch or the task for it is missing.

    Raises:
        EvenerError: the task is wrong.
    """
    if is_thin(order.task):
        from evener.run.ps_thin import load_thin_subject

        return load_thin_subject(order)
    from evener.run.ps_torch import load_torch_subject

    return load_torch_subject(order)
