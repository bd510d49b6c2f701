"""Rules of sums, means, largest elements, and the softmaxes."""

from __future__ import annotations

from math import prod
from typing import Any

from evener.autodiff.rules.rule import Rule


def _kept(shape: Any, axes: Any) -> Any:
    """The shape of a reduction over `axes` that keeps its axes."""
    return tuple(1 if i in axes else n for i, n in enumerate(shape))


def _sum(be: Any, x: Any, axes: Any, keepdims: bool) -> Any:
    return be.sum(x, axes, keepdims), (x.shape, axes)


def _mean(be: Any, x: Any, axes: Any, keepdims: bool) -> Any:
    total = be.sum(x, axes, keepdims)
    count = prod(x.shape[axis] for axis in axes)
    share = 1 / count if count else float("nan")
    return be.multiply(total, share, total), (x.shape, axes, share)


def _spread(be: Any, g: Any, shape: Any, axes: Any) -> Any:
    return be.broadcast(be.reshape(g, _kept(shape, axes)), shape)


def _max(be: Any, x: Any, axes: Any, keepdims: bool) -> Any:
    y = be.max(x, axes, keepdims)
    return y, (x, y, axes)


def _max_vjp(be: Any, g: Any, saved: Any, _out: Any) -> Any:
    """g in equal parts to all elements that are the largest."""
    x, y, axes = saved
    largest = be.compare("==", x, be.reshape(y, _kept(x.shape, axes)))
    share = be.copy(largest, be.new(x.shape, x.dtype))
    part = be.divide(be.reshape(g, _kept(x.shape, axes)), be.sum(share, axes, True))
    return be.multiply(share, part, share)


def _softmax(be: Any, x: Any, axis: int) -> Any:
    y = be.softmax(x, axis)
    return y, (y, axis)


def _softmax_vjp(be: Any, g: Any, saved: Any, _out: Any) -> Any:
    """y (g - sum(g y))."""
    y, axis = saved
    partial = be.multiply(g, y)
    total = be.sum(partial, (axis,), True)
    return be.multiply(be.subtract(g, total, partial), y, partial)


def _log_softmax(be: Any, x: Any, axis: int) -> Any:
    y = be.log_softmax(x, axis)
    return y, (y, axis)


def _log_softmax_vjp(be: Any, g: Any, saved: Any, _out: Any) -> Any:
    """g - exp(y) sum(g)."""
    y, axis = saved
    partial = be.exp(y)
    be.multiply(partial, be.sum(g, (axis,), True), partial)
    return be.subtract(g, partial, partial)


REDUCTIONS = {
    "sum": Rule(_sum, (lambda be, g, s, _: _spread(be, g, *s),)),
    "mean": Rule(_mean, (lambda be, g, s, _: _spread(be, be.multiply(g, s[2]), s[0], s[1]),)),
    "max": Rule(_max, (_max_vjp,)),
    "argmax": Rule(lambda be, x, axis, keepdims: (be.argmax(x, axis, keepdims), None)),
    "softmax": Rule(_softmax, (_softmax_vjp,)),
    "log_softmax": Rule(_log_softmax, (_log_softmax_vjp,)),
}
