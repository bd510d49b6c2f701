"""The data axis: between replicas, the ranks that have the same channels, whatever the sizes of their replicas.

A replica of three ranks and one of two divide channels differently: what a rank needs to know of its own channels comes
from several ranks of the other. So statistics are an exchange of two dims: replica and channel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evener.comm.exchange import Exchange, Route
from evener.oracle.division.layout import Intervals, Layout, divide
from evener.parallel.process_mesh import ProcessMesh


class DataAxis:
    """Gathers what replicas know of channels; it stands for the group of a GroupBatchNorm.

    Args:
        mesh: of this rank.
        layouts: of the normalised value in every replica.
        channels: in all.
    """

    def __init__(self, mesh: ProcessMesh, layouts: tuple[Layout, ...], channels: int) -> None:
        self.size = len(layouts)
        own: list[tuple[int, Intervals]] = []
        need: list[Intervals] = []
        for index, (layout, replica) in enumerate(zip(layouts, mesh.arrangement.replicas, strict=True)):
            parts = layout.along(1)
            own += [(index, part) for part in parts or divide((channels,), replica.shares)]
            need += parts or [((0, channels),)] * replica.size
        self._own = own[mesh.world.rank][1] if layouts[mesh.index].along(1) is None else None
        self._exchanges = {
            rows: Exchange(
                mesh.world,
                [
                    Route(
                        tuple((((0, rows),), ((index, index + 1),), part) for index, part in own),
                        tuple((((0, rows),), ((0, self.size),), part) for part in need),
                    )
                ],
                "statistics",
            )
            for rows in (2, 3)
        }

    def all_gather(self, statistics: Tensor, _kind: str) -> Tensor:
        """Every replica's (mean, variance, count) of the own channels, (replicas, 2 C + 1), from this one's."""
        rows = statistics[:-1].view(2, -1)
        rows = torch.cat((rows, statistics[-1].expand(1, rows.shape[1])))
        gathered = self._gather(rows)
        return torch.stack([torch.cat((one[0], one[1], _count(one[2]))) for one in gathered.unbind(1)])

    def all_sum(self, sums: Tensor, _kind: str) -> Tensor:
        """Sum of every replica's two rows (2, C) of the own channels."""
        return self._gather(sums).sum(1)

    def _gather(self, rows: Tensor) -> Tensor:
        """(rows, replicas, own channels) from (rows, own channels)."""
        if self._own is not None:  # all ranks of a replica have all channels: each one speaks for some
            rows = torch.cat([rows[:, a:b] for a, b in self._own] or [rows[:, :0]], 1)
        return self._exchanges[len(rows)].spread([rows.unsqueeze(1)])[0]


def _count(row: Tensor) -> Tensor:
    """The count, which is the same for all channels; of no channels, any that BatchNorm does not refuse."""
    return row[:1] if row.numel() else row.new_full((1,), 2)
