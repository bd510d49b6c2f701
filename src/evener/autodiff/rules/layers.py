"""Rules of layers: matrix products, convolutions, pooling, embedding, normalisation, losses."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from evener.autodiff.graph import Rule


def _swapped(be: Any, a: Any) -> Any:
    """The transpose of the last two axes."""
    n = len(a.shape)
    return be.transpose(a, (*range(n - 2), n - 1, n - 2))


def _rows(be: Any, a: Any) -> Any:
    """[..., K] as a matrix [N, K]."""
    return a if len(a.shape) == 2 else be.reshape(a, (-1, a.shape[-1]))


def _linear(be: Any, x: Any, w: Any, bias: Any) -> Any:
    """x[..., I] w[O, I]^T + bias[O]."""
    rows = _rows(be, x)
    y = be.matmul(rows, be.transpose(w, (1, 0)))
    if bias is not None:
        be.add(y, bias, y)
    return be.reshape(y, (*x.shape[:-1], w.shape[0])) if rows is not x else y, (x.shape, rows, w)


def _linear_input(be: Any, g: Any, saved: Any, _out: Any) -> Any:
    shape, _, w = saved
    return be.reshape(be.matmul(_rows(be, g), w), shape)


def _linear_weight(be: Any, g: Any, saved: Any, out: Any) -> Any:
    return be.matmul(be.transpose(_rows(be, g), (1, 0)), saved[1], out)


def _linear_bias(be: Any, g: Any, _saved: Any, out: Any) -> Any:
    return be.sum(_rows(be, g), (0,), False, out)


def _conv2d(be: Any, x: Any, w: Any, bias: Any, window: Any, groups: int) -> Any:
    y, taps = be.conv2d(x, w, window, groups)
    if bias is not None:
        be.add(y, be.reshape(bias, (-1, 1, 1)), y)
    return y, (x.shape, taps, w, window, groups)


def _conv2d_input(be: Any, g: Any, saved: Any, _out: Any) -> Any:
    shape, _, w, window, groups = saved
    return be.conv2d_input(g, w, shape, window, groups)


def _conv2d_weight(be: Any, g: Any, saved: Any, out: Any) -> Any:
    _, taps, w, _, groups = saved
    return be.conv2d_weight(g, taps, w, groups, out)


def _conv2d_bias(be: Any, g: Any, _saved: Any, out: Any) -> Any:
    return be.sum(g, (0, 2, 3), False, out)


def _max_pool2d(be: Any, x: Any, window: Any) -> Any:
    y, saved = be.max_pool2d(x, window)
    return y, (saved, x.shape)


def _embedding(be: Any, index: Any, table: Any) -> Any:
    return be.take_rows(table, index), (index, table.shape)


def _embedding_table(be: Any, g: Any, saved: Any, out: Any) -> Any:
    index, shape = saved
    return be.put_add(shape, (index,), g, out)


PRODUCTS = {
    "matmul": Rule(
        lambda be, a, b: (be.matmul(a, b), (a, b)),
        (
            lambda be, g, s, _: be.matmul(g, _swapped(be, s[1])),
            lambda be, g, s, _: be.matmul(_swapped(be, s[0]), g),
        ),
    ),
    "linear": Rule(_linear, (_linear_input, _linear_weight, _linear_bias)),
    "conv2d": Rule(_conv2d, (_conv2d_input, _conv2d_weight, _conv2d_bias)),
    "max_pool2d": Rule(_max_pool2d, (lambda be, g, s, _: be.max_pool2d_input(g, *s),)),
    "avg_pool2d": Rule(
        lambda be, x, window: (be.avg_pool2d(x, window), (x.shape, window)),
        (lambda be, g, s, _: be.avg_pool2d_input(g, *s),),
    ),
    "embedding": Rule(_embedding, (lambda *_: None, _embedding_table)),
}


# Normalisation: subtract the mean, divide by the standard deviation, scale and shift.


class Axes(NamedTuple):
    """The axes of a normalisation.

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
    """Return g and g * normal summed over the axes along which scale and shift repeat, for all gradients."""

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


# Losses: one value for each sample, or their sum times a share (1, or 1 / number for the mean).


def _total(be: Any, each: Any, share: float | None) -> Any:
    if share is None:
        return each
    total = be.sum(each, tuple(range(len(each.shape))), False)
    return be.multiply(total, share, total)


def _nll(be: Any, scores: Any, index: Any, share: float | None) -> Any:
    """-scores[n, index[n]] for every row n."""
    picked = be.pick(scores, index)
    return _total(be, be.negative(picked, picked), share), (scores.shape, index, share)


def _nll_scores(be: Any, g: Any, saved: Any, _out: Any) -> Any:
    shape, index, share = saved
    return be.unpick(shape, index, be.multiply(g, -1 if share is None else -share))


def _mse(be: Any, a: Any, b: Any, share: float | None) -> Any:
    """(a - b)^2."""
    difference = be.subtract(a, b)
    return _total(be, be.multiply(difference, difference), share), (difference, share)


def _mse_operand(sign: int) -> Any:
    def vjp(be: Any, g: Any, saved: Any, _out: Any) -> Any:
        difference, share = saved
        return be.multiply(difference, be.multiply(g, 2 * sign * (1 if share is None else share)))

    return vjp


LOSSES = {"nll": Rule(_nll, (_nll_scores,)), "mse": Rule(_mse, (_mse_operand(1), _mse_operand(-1)))}
