"""Comparison of the changes that a program makes to a loader's sampler, among the nodes.

Only the sampler of the first node yields batches. If a program tells its sampler the losses of this node's samples, the
first node's sampler misses those of the other nodes, and its batches differ from those of one process. The samplers of
the other nodes do not yield anything, so whatever changes in them was changed by the program.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from evener.comm.group import Group
from evener.data.alike import print_of
from evener.records.errors import InvalidInput

_TOPIC = "the sampler's changes"
_DEPTH = 3
"""Attributes of attributes of a sampler that are compared."""
_LARGEST, _MOST = 1_000_000, 10_000
"""Numbers of one tensor that are compared (of a larger one, every second, third ... one), and items of a mixed list."""
_UNSEEN, _LARGE = 1234.5, 1e30
"""Stand-ins for NaN and infinity, which tables hold for samples without a loss."""


class SamplerState:
    """The attributes of a sampler at the beginning of a run.

    Args:
        batches: batch sampler of the user's loader.
        dataset: of that loader, which is not compared.
    """

    def __init__(self, batches: Any, dataset: Any) -> None:
        self._batches, self._dataset = batches, dataset
        self._first = self._prints()

    def require_same_changes(self, group: Group) -> None:
        """Compare what has changed since the beginning; all ranks call this.

        Raises:
            InvalidInput: the program changed the sampler of another node in another way than the first node's.
        """
        now = self._prints()
        changed = now if group.is_leader else {name: one for name, one in now.items() if one != self._first.get(name)}
        message = msgspec.msgpack.encode(changed)
        rows = [msgspec.msgpack.decode(row, type=dict[str, float]) for row in group.all_gather_bytes(message, _TOPIC)]
        for rank, row in enumerate(rows[1:], start=1):
            for name, value in row.items():
                if not np.isclose(value, rows[0].get(name, np.nan), rtol=1e-9, atol=0.0):
                    raise InvalidInput(
                        f"the program changes `{name}` of its sampler, in one way on node {group.nodes[0]} and in "
                        f"another on node {group.nodes[rank]}; batches then differ from those of one process: "
                        "if a sampler learns from losses, give it those of all nodes, by evener.gather"
                    )

    def _prints(self) -> dict[str, float]:
        return {name: _print(value) for name, value in self._values("", self._batches, _DEPTH)}

    def _values(self, name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
        """Yield the names and values of plain attributes of `value`, or `value` itself if it is plain."""
        if value is self._dataset or isinstance(value, Dataset | nn.Module):
            return
        if isinstance(value, Tensor | np.ndarray | int | float | str | list | tuple | dict | set):
            yield name or type(value).__name__, value
        elif depth and hasattr(value, "__dict__") and not callable(value):
            for attribute, item in vars(value).items():
                yield from self._values(f"{name}.{attribute}" if name else attribute, item, depth - 1)


def _print(value: Any) -> float:
    """Return a number that differs for different values; 0.0 for one without numbers and texts."""
    if isinstance(value, set):
        value = sorted(value, key=repr)
    if isinstance(value, dict):
        return _print(list(value)) + 3.0 * _print(list(value.values()))
    if isinstance(value, list | tuple):
        try:
            value = torch.from_numpy(np.asarray(value, dtype=np.float64))
        except (TypeError, ValueError, RuntimeError):  # of more than numbers of one shape
            return print_of(value[:_MOST])
    if isinstance(value, Tensor | np.ndarray):
        numbers = torch.as_tensor(value).detach().flatten()
        numbers = numbers[:: max(1, numbers.numel() // _LARGEST)].double()
        return print_of(torch.nan_to_num(numbers, nan=_UNSEEN, posinf=_LARGE, neginf=-_LARGE))
    return print_of(value)
