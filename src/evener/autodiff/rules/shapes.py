"""Rules of what moves elements without computing, and of what makes many elements one."""

from __future__ import annotations

from math import prod
from typing import Any

from evener.autodiff.rules.rule import ForEach, Rule, through


def _transpose_back(be: Any, g: Any, axes: Any, _out: Any) -> Any:
    inverse = [0] * len(axes)
    for to, source in enumerate(axes):
        inverse[source] = to
    return be.transpose(g, tuple(inverse))


def _concatenate(be: Any, *arrays_and_axis: Any) -> Any:
    *arrays, axis = arrays_and_axis
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + array.shape[axis])
    return be.concatenate(arrays, axis), (starts, axis)


def _part(i: int, be: Any, g: Any, saved: Any, _out: Any) -> Any:
    starts, axis = saved
    return be.take(g, (slice(None),) * axis + (slice(starts[i], starts[i + 1]),))


SHAPES = {
    "reshape": Rule(
        lambda be, x, shape: (be.reshape(x, shape), x.shape), (lambda be, g, shape, _: be.reshape(g, shape),)
    ),
    "transpose": Rule(lambda be, x, axes: (be.transpose(x, axes), axes), (_transpose_back,)),
    "expand": Rule(lambda be, x, shape: (be.broadcast(x, shape), None), (through,)),
    "concatenate": Rule(_concatenate, ForEach(_part)),
    "index": Rule(
        lambda be, x, index: (be.take(x, index), (x.shape, index)),
        (lambda be, g, s, _: be.put_add(s[0], s[1], g),),
    ),
    "gather": Rule(
        lambda be, x, index, axis: (be.take_along(x, index, axis), (x.shape, index, axis)),
        (lambda be, g, s, _: be.put_along(s[0], s[1], g, s[2]),),
    ),
}


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
