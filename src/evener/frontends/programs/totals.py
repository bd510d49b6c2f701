"""Numbers and tensors of a program, added up over all ranks, in the type in which the program has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evener.comm.group import Group
from evener.records.errors import InvalidInput, NodeLost

_PATIENCE = 60.0
"""Seconds that a node waits for the others where all have to call the same; those may compute as long."""


def total_of(group: Group, what: str, own: NDArray[np.float64], patience: float) -> NDArray[np.float64]:
    """The sum of every rank's numbers, of one shape on all.

    Args:
        group: the ranks.
        what: is called, such as `mean`.
        own: this rank's numbers.
        patience: seconds of silence after which a rank is given up.

    Raises:
        InvalidInput: another rank does not call this.
        OutOfStep: another rank calls something else.
    """
    if group.size == 1:
        return own
    assert group.mesh is not None
    try:
        with group.waiting("values"), group.mesh.within(max(_PATIENCE, patience)):
            rows = group.all_gather_bytes(own.tobytes(), f"run.{what} of a value of shape {own.shape}")
    except NodeLost as error:
        raise InvalidInput(
            f"run.{what} waits for nodes that do not call it: all have to, not only run.leader"
        ) from error
    total: NDArray[np.float64] = np.sum([np.frombuffer(row).reshape(own.shape) for row in rows], axis=0)
    return total


def numbers_of(value: Any) -> Any:
    """A number or a tensor as numbers of float64."""
    detached = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
    return np.asarray(detached, dtype=np.float64)


def mean_like(value: Any, numbers: Any) -> Any:
    """`numbers` as a tensor where `value` is one, else as plain numbers."""
    if isinstance(value, Tensor):
        dtype = value.dtype if value.is_floating_point() else torch.float64
        return torch.as_tensor(numbers, dtype=dtype, device=value.device)
    return numbers if isinstance(value, np.ndarray) else float(numbers)


def sum_like(value: Any, numbers: Any) -> Any:
    """Likewise, of the same type."""
    if isinstance(value, Tensor):
        return torch.as_tensor(numbers, device=value.device).to(value.dtype)
    return numbers if isinstance(value, np.ndarray) else type(value)(numbers)
