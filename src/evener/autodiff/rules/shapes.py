"""Rules of the operations that move elements without computing: their gradients move them back."""

from __future__ import annotations

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
