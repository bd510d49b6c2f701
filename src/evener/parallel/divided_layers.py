"""What a rank computes of layers that are divided: by filters, by input channels, dropout, GroupNorm; empty outputs.

    filters     y[own] = conv(x, w[own])                     x: all channels that the own filters read
    channels    y = sum over ranks of conv(x[own], w[:, own])

N samples, c own channels, S own pixels, G groups of channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from evener.comm.group import Group
from evener.oracle.division.layout import Intervals, Region, Shape
from evener.parallel.norm_statistics import Statistics, combine
from evener.parallel.redistribute import part_of


def empty_output(shape: Sequence[int], *tensors: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros of `shape` that depend (with gradients of zero) on all `tensors`.

    Args:
        shape: of the result.
        tensors: what the result would be computed of; at least one.
        dtype: of the result, by default the type in which layers with weights compute.
    """
    dtype = dtype or compute_dtype(tensors[0])
    tie = torch.stack([tensor.flatten()[:0].sum().to(dtype) for tensor in tensors]).sum()
    return tie.expand(tuple(shape))


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type in which convolutions and linear layers compute: that of autocast, if it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class FilterParallel:
    """A layer of this rank's filters.

    Args:
        layer: convolution or linear layer whose weights are the own ones.
        shape: of the own output; without filters it is empty.
    """

    def __init__(self, layer: nn.Module, shape: Sequence[int]) -> None:
        self._layer, self._shape = layer, shape

    def __call__(self, x: Tensor) -> Tensor:
        """The own outputs (N, own filters, ...)."""
        if 0 in self._shape:
            return empty_output(self._shape, x, *self._layer.parameters())
        y: Tensor = self._layer(x)
        return y


class ChannelParallel:
    """A layer of this rank's input channels.

    Args:
        layer: convolution or linear layer whose weights, and bias, are the own ones.
        adds: filters whose bias this rank has.
        shape: of the output.
    """

    def __init__(self, layer: nn.Module, adds: Intervals, shape: Sequence[int]) -> None:
        self._layer, self._shape = layer, shape
        self._adds = torch.tensor([i for a, b in adds for i in range(a, b)], dtype=torch.long)

    def __call__(self, x: Tensor) -> Tensor:
        """This rank's addend of the output."""
        bias = self._bias()
        if x.numel() == 0:
            y = empty_output(self._shape, x, *self._layer.parameters())
            return y if bias is None else y + bias.to(y.dtype).view(-1, *[1] * (len(self._shape) - 2))
        changed = {} if bias is None else {"bias": bias}
        z: Tensor = functional_call(self._layer, changed, (x,)) if changed else self._layer(x)
        return z

    def _bias(self) -> Tensor | None:
        """A bias of all filters, zero where another rank adds it."""
        own = self._layer.bias
        if not isinstance(own, Tensor):
            return None
        return own.new_zeros(self._shape[1]).index_copy(0, self._adds.to(own.device), own)


def dropout(x: Tensor, probability: float, shape: Shape, region: Region, samples: tuple[int, int]) -> Tensor:
    """What is left of this rank's part `x` of a value.

    Args:
        x: this rank's part.
        probability: of a number to be dropped.
        shape: of the replica's value.
        region: of it that this rank has.
        samples: first one of this replica, and number over all replicas.
    """
    first, total = samples
    mask = F.dropout(torch.ones((total, *shape[1:]), dtype=x.dtype, device=x.device), probability)
    own = mask[first : first + shape[0]] if total >= first + shape[0] else mask[:1]  # a stand-in for no samples
    return x * part_of(own, region).clone()  # a view would keep all of the mask


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, belongs: Tensor, eps: float, group: Group
) -> Tensor:
    """GroupNorm (InstanceNorm) of `x` (N, c, ...) over each group's channels and pixels on all ranks of `group`.

    Args:
        x: own channels and pixels.
        weight: of the own channels, (c,).
        bias: likewise.
        belongs: (c, G), of float32 or float64: 1 where a channel belongs to a group.
        eps: added to the variance.
        group: the ranks that have the rest.
    """
    normal = cast(Tensor, _NormaliseGroups.apply(x, belongs, eps, group))  # type: ignore[no-untyped-call]
    shape = (1, -1) + (1,) * (x.dim() - 2)
    scaled = normal if weight is None else normal * weight.view(shape)
    return scaled if bias is None else scaled + bias.view(shape)


class _NormaliseGroups(torch.autograd.Function):
    """x -> x less the mean of its group, over the standard deviation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, belongs: Tensor, eps: float, group: Group) -> Tensor:
        rows = x.flatten(2).to(belongs.dtype)
        parts = group.all_gather(_group_statistics(rows, belongs), "statistics")
        mean, var, count = combine(Statistics(*parts.unbind(1)))
        invstd = torch.rsqrt(var + eps)
        normal = (rows - (mean @ belongs.t())[:, :, None]) * (invstd @ belongs.t())[:, :, None]
        ctx.save_for_backward(normal, belongs, invstd, count)
        ctx.group = group
        return normal.view_as(x).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        normal, belongs, invstd, count = ctx.saved_tensors
        rows = dy.flatten(2).to(normal.dtype)
        own = torch.stack((rows.sum(2) @ belongs, (rows * normal).sum(2) @ belongs))
        means = ctx.group.all_sum(own, "statistics") / count
        shift, slope = means @ belongs.t()
        dx = (rows - shift[:, :, None] - normal * slope[:, :, None]) * (invstd @ belongs.t())[:, :, None]
        return dx.view_as(dy).to(dy.dtype), None, None, None


def _group_statistics(rows: Tensor, belongs: Tensor) -> Tensor:
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
