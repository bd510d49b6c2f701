"""A model of Ultralytics whose training pass is that of all ranks: what DistributedDataParallel is to its own runs.

The trainer finds the model itself in `module`, as it does with DistributedDataParallel, where it copies and saves it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from evener.comm.group import Group
from evener.data.loader import seed_all
from evener.parallel.shared_statistics import SharedStatistics
from evener.yolo.cut_loader import CutLoader


class EvenModel(nn.Module):
    """A model of which every rank computes its part of a batch; BatchNorms have the statistics of the whole.

    Args:
        module: the model.
        group: the ranks.
        loader: of the batches that the model is called with.
        seed: of random numbers that it draws, together with step and rank.
    """

    def __init__(self, module: nn.Module, group: Group, loader: CutLoader, seed: int) -> None:
        super().__init__()
        self.module = module
        self._group, self._loader, self._seed = group, loader, seed
        self._shared = SharedStatistics(lambda _: group)

    def forward(self, batch: Any) -> Any:
        """The loss of a batch, and its parts."""
        part = self._loader.part
        assert part is not None
        seed_all(self._seed, part.step, self._group.rank, device=self._group.device)
        if self._group.size == 1:
            return self.module(batch)
        self._shared.counting = len(part.indices) > 0
        with self._shared:
            return self.module(batch)
