"""The rule of batch norm and layer norm: subtract the mean, divide by the standard deviation, scale and shift.

They differ in the axes over which mean and variance are taken (batch norm: all but channels; layer norm: the last
ones), and in those over which scale and shift are shared.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from evener.autodiff.rules.rule import Rule


class Axes(NamedTuple):
    """How an input is normalised.

    Attributes:
        over: axes whose elements share a mean and a variance.
        shared: axes along which scale and shift repeat.
    """

    over: tuple[int, ...]
    shared: tuple[int, ...]


class Running(NamedTuple):
    """Statistics that follow those of the batches, as arrays [C], and the weight of a new one."""

    mean: Any
    variance: Any
    momentum: float


class _Saved(NamedTuple):
    normal: Any
    inverse: Any
    weight: Any
    axes: Axes
    share: float


class _Sums(NamedTuple):
    """What all gradients need: g and g * normal summed over the axes along which scale and shift repeat."""

    saved: _Saved
    g_normal: Any


def _affine_shape(shape: Any, axes: Axes) -> tuple[int, ...]:
    return tuple(1 if i in axes.shared else n for i, n in enumerate(shape))


def _normalise(be: Any, x: Any, weight: Any, bias: Any, axes: Axes, eps: float, running: Running | None) -> Any:
    """(x - mean) / sqrt(variance + eps) * weight + bias; also moves the running statistics."""
    count = prod(x.shape[axis] for axis in axes.over)
    share = 1 / count
    mean = be.sum(x, axes.over, True)
    be.multiply(mean, share, mean)
    normal = be.subtract(x, mean)
    variance = be.sum(be.multiply(normal, normal), axes.over, True)
    be.multiply(variance, share, variance)
    if running is not None:
        _move(be, running.mean, mean, running.momentum, 1.0)
        _move(be, running.variance, variance, running.momentum, count / (count - 1) if count > 1 else float("nan"))
    inverse = be.sqrt(be.add(variance, eps))
    be.divide(be.fill(be.new(inverse.shape, inverse.dtype), 1), inverse, inverse)
    be.multiply(normal, inverse, normal)
    y, shape = normal, _affine_shape(x.shape, axes)
    if weight is not None:
        y = be.multiply(normal, be.reshape(weight, shape))
    if bias is not None:
        y = be.add(y, be.reshape(bias, shape), None if y is normal else y)
    return y, _Saved(normal, inverse, weight, axes, share)


def _move(be: Any, running: Any, new: Any, momentum: float, correction: float) -> None:
    """running = (1 - momentum) running + momentum * correction * new."""
    step = be.multiply(be.reshape(new, running.shape), momentum * correction)
    be.add(be.multiply(running, 1 - momentum, running), step, running)


def _prepare(be: Any, g: Any, saved: _Saved) -> _Sums:
    return _Sums(saved, be.multiply(g, saved.normal))


def _input(be: Any, g: Any, sums: _Sums, _out: Any) -> Any:
    """inverse (h - mean(h) - normal mean(h normal)), h = g weight, means over the axes of the statistics."""
    normal, inverse, weight, axes, share = sums.saved
    h, h_normal = g, sums.g_normal
    if weight is not None:
        scale = be.reshape(weight, _affine_shape(g.shape, axes))
        h, h_normal = be.multiply(g, scale), be.multiply(h_normal, scale)
    mean = be.sum(h, axes.over, True)
    slope = be.sum(h_normal, axes.over, True)
    partial = be.multiply(normal, be.multiply(slope, share, slope))
    be.add(partial, be.multiply(mean, share, mean), partial)
    be.subtract(h, partial, partial)
    return be.multiply(partial, inverse, partial)


def _weight(be: Any, _g: Any, sums: _Sums, _out: Any) -> Any:
    shape = sums.saved.weight.shape
    return be.reshape(be.sum(sums.g_normal, sums.saved.axes.shared, False), shape)


def _bias(be: Any, g: Any, sums: _Sums, _out: Any) -> Any:
    return be.sum(g, sums.saved.axes.shared, False)


NORMALISATION = {"normalise": Rule(_normalise, (_input, _weight, _bias), _prepare)}
