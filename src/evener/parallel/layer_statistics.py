"""Exchange of statistics for one normalisation layer, so that ranks notice when another rank is in another layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from evener.comm.group import Group
from evener.comm.message_topics import statistics


class LayerStatistics:
    """Gather and sum statistics for one layer.

    Args:
        group: The ranks.
        layer: The layer's name.
    """

    def __init__(self, group: Group, layer: str) -> None:
        self._group, self._topic = group, statistics(layer)

    def all_gather(self, tensor: Tensor, kind: str) -> Tensor:
        """Gather `tensor` from all ranks."""
        return self._group.all_gather(tensor, kind, self._topic)

    def begin_all_sum(self, tensor: Tensor, kind: str) -> Callable[[], Tensor]:
        """Start to sum `tensor` over all ranks."""
        return self._group.begin_all_sum(tensor, kind, f"{self._topic} in backward")

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerStatistics:
        return self  # a copy of a model is on the same ranks
