"""Sums of a program's numbers and tensors over all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evener.comm.group import Group
from evener.records.errors import InvalidInput, NodeLost
from evener.system import accelerators

_PATIENCE = 60.0
"""Seconds that a node waits for the same call of the others, which may still compute."""


def total_of(group: Group, what: str, numbers: NDArray[np.float64], patience: float) -> NDArray[np.float64]:
    """Return the sum of every rank's numbers, of one shape on all.

    Args:
        group: the ranks.
        what: name of the call, such as `mean`.
        numbers: this rank's.
        patience: seconds of silence after which a rank is lost.

    Raises:
        InvalidInput: another rank does not call this.
        OutOfStep: another rank makes a different call.
    """
    if group.size == 1:
        return numbers
    try:
        rows = numbers_of_ranks(group, f"run.{what} of a value of shape {numbers.shape}", numbers, patience)
    except NodeLost as error:
        raise InvalidInput(
            f"run.{what} waits for nodes that do not call it: all have to, not only run.leader"
        ) from error
    total: NDArray[np.float64] = np.sum(rows, axis=0)
    return total


def numbers_of_ranks(group: Group, topic: str, numbers: NDArray[np.float64], patience: float) -> NDArray[np.float64]:
    """Return every rank's numbers, shape (ranks, *numbers.shape), of one shape on several ranks.

    Args:
        group: the ranks.
        topic: of the message.
        numbers: this rank's.
        patience: seconds of silence after which a rank is lost.

    Raises:
        NodeLost: another rank does not call this.
        OutOfStep: another rank makes a different call.
    """
    assert group.mesh is not None
    with group.waiting("values"), group.mesh.within(max(_PATIENCE, patience)):
        rows = group.all_gather_bytes(numbers.tobytes(), topic)
    return np.stack([np.frombuffer(row).reshape(numbers.shape) for row in rows])


def numbers_of(value: Any) -> Any:
    """Convert a number or a tensor to a float64 array."""
    detached = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
    return np.asarray(detached, dtype=np.float64)


def mean_like(value: Any, numbers: Any) -> Any:
    """Convert `numbers` to a tensor if `value` is one, else to plain numbers."""
    if isinstance(value, Tensor):
        dtype = value.dtype if value.is_floating_point() else accelerators.widest(value.device)
        return accelerators.moved(torch.as_tensor(numbers, dtype=dtype), value.device)
    return numbers if isinstance(value, np.ndarray) else float(numbers)


def sum_like(value: Any, numbers: Any) -> Any:
    """Convert `numbers` to the type of `value`."""
    if isinstance(value, Tensor):
        return accelerators.moved(torch.as_tensor(numbers, dtype=value.dtype), value.device)
    return numbers if isinstance(value, np.ndarray) else type(value)(numbers)
