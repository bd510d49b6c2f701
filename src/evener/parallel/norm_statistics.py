"""Mean and variance of divided values: over several ranks, micro-batches, strips or replicas.

Every part is reduced to (mean, biased variance, count). `combine` combines parts (Chan, Golub & LeVeque 1979), which
loses fewer digits than sums of squares. The norms (`norms.py`) differ in the parts and in the ranks that gather them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from evener.comm.exchange import Exchange, Route
from evener.comm.group import Group
from evener.comm.message_topics import statistics
from evener.oracle.division.layout import Intervals, Layout, divide
from evener.parallel.process_mesh import ProcessMesh

_BLOCK_BYTES = 1 << 19
"""Size of the blocks whose statistics are computed at once: with a copy, a block fits the cache of a core."""
_MIN_ROW_PIXELS = 256
"""Shortest row for which sums along rows are fast."""


class Statistics(NamedTuple):
    """The statistics of values, or of parts of them stacked in dim 0. The three shapes are broadcastable."""

    mean: Tensor
    var: Tensor
    num_values: Tensor


def combine(parts: Statistics) -> Statistics:
    """Return the statistics of all parts together; zeros if no part has a value."""
    means, variances, counts = parts
    count = counts.sum(0)
    divisor = count.clamp(min=1)
    mean = (counts * means).sum(0) / divisor
    var = (counts * (variances + (means - mean).square())).sum(0) / divisor
    return Statistics(mean, var, count)


def stat_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which statistics of `x` are computed."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def channel_statistics(x: Tensor, counted: bool = True) -> Tensor:
    """Return means, biased variances and count (0 if not `counted`) of the channels of (N, C, ...), (2 C + 1,)."""
    x = x.detach().to(stat_dtype(x))
    channels = x.shape[1]
    if x.numel() == 0:
        return x.new_zeros(2 * channels + 1)
    if x.device.type == "cpu":
        last = x.movedim(1, -1)
        if x.is_contiguous() and x[0, 0].numel() >= _MIN_ROW_PIXELS:
            mean, var = _row_statistics(x.flatten(2))
        else:
            mean, var = _whole_statistics(last.flatten(0, -2) if last.is_contiguous() else x)
    else:
        var, mean = torch.var_mean(x, [d for d in range(x.dim()) if d != 1], correction=0)
    return torch.cat((mean, var, mean.new_full((1,), x.numel() // channels if counted else 0)))


def _row_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and biased variances of the channels of (N, C, S), combined from those of rows of S values.

    Rows are processed in blocks, which stay in the cache until their variance is known. Processing all of a large `x`
    at once takes two to four times as long.
    """
    samples, channels, pixels = x.shape
    rows = x.reshape(samples * channels, pixels)
    mean, var = x.new_empty(2, samples * channels)
    count = max(1, _BLOCK_BYTES // (pixels * x.element_size()))
    blocks = (torch.split(tensor, count) for tensor in (rows, mean, var))
    for block, block_mean, block_var in zip(*blocks, strict=True):
        torch.sum(block, 1, out=block_mean)
        block_mean /= pixels
        torch.sum((block - block_mean.unsqueeze(1)).square_(), 1, out=block_var)
    var /= pixels
    parts = Statistics(mean.view(samples, channels), var.view(samples, channels), x.new_full((samples, 1), pixels))
    return combine(parts)[:2]


def _whole_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same for (N, C, ...) in any memory format, by sums over whole samples, which vectorise."""
    values = x.numel() // x.shape[1]
    mean = _channel_sum(x) / values
    shape = (1, -1) + (1,) * (x.dim() - 2)
    return mean, _channel_sum((x - mean.view(shape)).square_()) / values


def combine_channels(rows: Tensor) -> Statistics:
    """Combine the results of `channel_statistics` on p ranks, (p, 2 C + 1). The count has shape (1,)."""
    channels = rows.shape[1] // 2
    return combine(Statistics(rows[:, :channels], rows[:, channels:-1], rows[:, -1:]))


def group_statistics(rows: Tensor, belongs: Tensor) -> Tensor:
    """Return mean, biased variance and count (3, N, G) of the groups in `rows` (N, c, S); zeros for absent groups.

    Args:
        rows: N samples of c channels of S pixels.
        belongs: (c, G), 1 where a channel belongs to a group.
    """
    count = (belongs.sum(0) * rows.shape[2]).expand(len(rows), -1)
    divisor = count.clamp(min=1)
    mean = (rows.sum(2) @ belongs) / divisor
    centred = rows - (mean @ belongs.t())[:, :, None]
    return torch.stack((mean, (centred.square().sum(2) @ belongs) / divisor, count))


def _channel_sum(x: Tensor) -> Tensor:
    """Return the sum of (N, C, ...) over all dims but the channels, (C,)."""
    return x.sum(0) if x.dim() == 2 else x.sum(0).flatten(1).sum(1)


class DataAxis:
    """Exchanges the statistics of this rank's channels between replicas, in place of a group of ranks.

    Replicas of three and of two ranks divide channels differently, so a rank needs statistics from several ranks of the
    other replica. The exchange therefore has two dims: replica and channel.

    Args:
        mesh: The position of this rank.
        layouts: Layout of the normalised value in every replica.
        channels: Number of all channels.
    """

    def __init__(self, mesh: ProcessMesh, layouts: tuple[Layout, ...], channels: int) -> None:
        self.size = len(layouts)
        parts: list[tuple[int, Intervals]] = []
        need: list[Intervals] = []
        for index, (layout, replica) in enumerate(zip(layouts, mesh.arrangement.replicas, strict=True)):
            split = layout.along(1)
            parts += [(index, part) for part in split or divide((channels,), replica.shares)]
            need += split or [((0, channels),)] * replica.size
        self._own = parts[mesh.world.rank][1] if layouts[mesh.index].along(1) is None else None

        def exchange(rows: int) -> Exchange:
            have = tuple((((0, rows),), ((index, index + 1),), part) for index, part in parts)
            wanted = tuple((((0, rows),), ((0, self.size),), part) for part in need)
            return Exchange(mesh.world, [Route(have, wanted)], "statistics")

        self._exchanges = {rows: exchange(rows) for rows in (2, 3)}

    def all_gather(self, statistics: Tensor, _kind: str) -> Tensor:
        """Return every replica's (mean, variance, count) of this rank's channels, (replicas, 2 C + 1)."""
        rows = statistics[:-1].view(2, -1)
        rows = torch.cat((rows, statistics[-1].expand(1, rows.shape[1])))
        gathered = self._begin_gather(rows)()
        return torch.stack([torch.cat((one[0], one[1], _count(one[2]))) for one in gathered.unbind(1)])

    def begin_all_sum(self, sums: Tensor, _kind: str) -> Callable[[], Tensor]:
        """Start to sum two rows (2, C) over replicas; the returned function waits for the sum."""
        arrive = self._begin_gather(sums)
        return lambda: arrive().sum(1)

    def _begin_gather(self, rows: Tensor) -> Callable[[], Tensor]:
        """Gather (rows, replicas, own channels) from (rows, own channels)."""
        if self._own is not None:  # all ranks of a replica have all channels: each one sends some
            rows = torch.cat([rows[:, a:b] for a, b in self._own] or [rows[:, :0]], 1)
        arrive = self._exchanges[len(rows)].begin_all_gather([rows.unsqueeze(1)])
        return lambda: arrive()[0]


def _count(row: Tensor) -> Tensor:
    """Return the count, which all channels share. Without channels, return a count that BatchNorm accepts."""
    return row[:1] if row.numel() else row.new_full((1,), 2)


class Gathers(Protocol):
    """Gathers and sums the statistics of all parts: those of a group's ranks, or of replicas."""

    def all_gather(self, tensor: Tensor, kind: str, /) -> Tensor:
        """Gather `tensor` from all parts, stacked."""
        ...

    def begin_all_sum(self, tensor: Tensor, kind: str, /) -> Callable[[], Tensor]:
        """Start to sum `tensor` over all parts; the returned function waits for it, before the next sum begins."""
        ...


class LayerStatistics:
    """Gathers and sums statistics for one layer.

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
