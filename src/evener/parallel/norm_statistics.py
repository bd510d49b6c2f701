"""Mean and variance of values that lie in parts: on several ranks, in several micro-batches, strips or replicas.

Every part is reduced to (mean, biased variance, count); `combine` puts parts together (Chan, Golub & LeVeque 1979),
which loses no digits where a sum of squares would. The norms (`norms.py`) differ in what a part is and in who gathers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from evener.comm.exchange import Exchange, Route
from evener.oracle.division.layout import Intervals, Layout, divide
from evener.parallel.process_mesh import ProcessMesh

_BLOCK_BYTES = 1 << 19
"""Of values, whose statistics are computed at a time: with a copy of it, less than the cache of a core."""
_LEAST_ROW = 256
"""Pixels of a row, from which on a sum along rows is fast."""


class Statistics(NamedTuple):
    """Of values, or of parts of them stacked in dim 0; the three shapes may be broadcast."""

    mean: Tensor
    var: Tensor
    num_values: Tensor


def combine(parts: Statistics) -> Statistics:
    """The statistics of all parts together; zeros where no part has a value."""
    means, variances, counts = parts
    count = counts.sum(0)
    divisor = count.clamp(min=1)
    mean = (counts * means).sum(0) / divisor
    var = (counts * (variances + (means - mean).square())).sum(0) / divisor
    return Statistics(mean, var, count)


def stat_dtype(x: Tensor) -> torch.dtype:
    """The type in which statistics of `x` are computed."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def channel_statistics(x: Tensor, counted: bool = True) -> Tensor:
    """Means, biased variances and count of the C channels of (N, C, ...), (2 C + 1,); a count of 0 if not `counted`."""
    x = x.detach().to(stat_dtype(x))
    channels = x.shape[1]
    if x.numel() == 0:
        return x.new_zeros(2 * channels + 1)
    if x.device.type == "cpu":
        last = x.movedim(1, -1)
        if x.is_contiguous() and x[0, 0].numel() >= _LEAST_ROW:
            mean, var = _row_statistics(x.flatten(2))
        else:
            mean, var = _whole_statistics(last.flatten(0, -2) if last.is_contiguous() else x)
    else:
        var, mean = torch.var_mean(x, [d for d in range(x.dim()) if d != 1], correction=0)
    return torch.cat((mean, var, mean.new_tensor([x.numel() // channels if counted else 0])))


def _row_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Means and biased variances of the channels of (N, C, S), whose rows of S are put together afterwards.

    Rows come in blocks, which are read from main memory once and are in the cache until their variance is known: over
    all of a large `x` at a time this takes two to four times as long.
    """
    samples, channels, pixels = x.shape
    rows = x.reshape(samples * channels, pixels)
    mean, var = x.new_empty(2, samples * channels)
    count = max(1, _BLOCK_BYTES // (pixels * x.element_size()))
    blocks = (torch.split(tensor, count) for tensor in (rows, mean, var))
    for own_rows, own_mean, own_var in zip(*blocks, strict=True):
        torch.sum(own_rows, 1, out=own_mean)
        own_mean /= pixels
        torch.sum((own_rows - own_mean.unsqueeze(1)).square_(), 1, out=own_var)
    var /= pixels
    parts = Statistics(mean.view(samples, channels), var.view(samples, channels), x.new_full((samples, 1), pixels))
    return combine(parts)[:2]


def _whole_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Likewise of (N, C, ...) in any memory format: sums over whole samples vectorise, which var_mean does not."""
    values = x.numel() // x.shape[1]
    mean = _channel_sum(x) / values
    shape = (1, -1) + (1,) * (x.dim() - 2)
    return mean, _channel_sum((x - mean.view(shape)).square_()) / values


def combine_channels(rows: Tensor) -> Statistics:
    """`combine` of what `channel_statistics` gave on p ranks, (p, 2 C + 1); the count is of shape (1,)."""
    channels = rows.shape[1] // 2
    return combine(Statistics(rows[:, :channels], rows[:, channels:-1], rows[:, -1:]))


def group_statistics(rows: Tensor, belongs: Tensor) -> Tensor:
    """Mean, biased variance and count (3, N, G) of the groups in `rows` (N, c, S); zeros for groups not there.

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
    """Sum of (N, C, ...) over all but the channels, shape (C,)."""
    return x.sum(0) if x.dim() == 2 else x.sum(0).flatten(1).sum(1)


class DataAxis:
    """Between replicas, the ranks that have the same channels; it stands for the group of a GroupBatchNorm.

    A replica of three ranks and one of two divide channels differently: what a rank needs to know of its own channels
    comes from several ranks of the other. So statistics are an exchange of two dims: replica and channel.

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

        def exchange(rows: int) -> Exchange:
            have = tuple((((0, rows),), ((index, index + 1),), part) for index, part in own)
            wanted = tuple((((0, rows),), ((0, self.size),), part) for part in need)
            return Exchange(mesh.world, [Route(have, wanted)], "statistics")

        self._exchanges = {rows: exchange(rows) for rows in (2, 3)}

    def all_gather(self, statistics: Tensor, _kind: str) -> Tensor:
        """Every replica's (mean, variance, count) of the own channels, (replicas, 2 C + 1), from this one's."""
        rows = statistics[:-1].view(2, -1)
        rows = torch.cat((rows, statistics[-1].expand(1, rows.shape[1])))
        gathered = self._begin_gather(rows)()
        return torch.stack([torch.cat((one[0], one[1], _count(one[2]))) for one in gathered.unbind(1)])

    def begin_all_sum(self, sums: Tensor, _kind: str) -> Callable[[], Tensor]:
        """Start to sum every replica's two rows (2, C) of the own channels; the function returned waits for it."""
        arrive = self._begin_gather(sums)
        return lambda: arrive().sum(1)

    def _begin_gather(self, rows: Tensor) -> Callable[[], Tensor]:
        """(rows, replicas, own channels) from (rows, own channels)."""
        if self._own is not None:  # all ranks of a replica have all channels: each one gives some
            rows = torch.cat([rows[:, a:b] for a, b in self._own] or [rows[:, :0]], 1)
        arrive = self._exchanges[len(rows)].begin_all_gather([rows.unsqueeze(1)])
        return lambda: arrive()[0]


def _count(row: Tensor) -> Tensor:
    """The count, which is the same for all channels; of no channels, any that BatchNorm does not refuse."""
    return row[:1] if row.numel() else row.new_full((1,), 2)


class Gathers(Protocol):
    """Gathers and sums the statistics of all parts: those of a group's ranks, or of replicas."""

    def all_gather(self, tensor: Tensor, kind: str, /) -> Tensor:
        """Everybody's `tensor`, stacked."""
        ...

    def begin_all_sum(self, tensor: Tensor, kind: str, /) -> Callable[[], Tensor]:
        """Start to sum everybody's `tensor`; the function that is returned waits for it, before the next is begun."""
        ...
