"""Rules of operations on arrays: element by element (all of them broadcast), moving elements, and reducing them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count
from math import pi, prod, sqrt
from typing import Any

from evener.autodiff.graph import Forward, Rule, Vjp


def _through(_be: Any, g: Any, _saved: Any, _out: Any) -> Any:
    """Return the vjp of an input that is passed on, or only broadcast."""
    return g


def _without_saving(primitive: str) -> Forward:
    """A forward that computes one primitive of the back end and saves nothing."""
    return lambda be, *inputs: (getattr(be, primitive)(*inputs), None)


def _with_inputs(primitive: str) -> Any:
    """A forward that computes one primitive of the back end and saves its inputs."""
    return lambda be, *inputs: (getattr(be, primitive)(*inputs), inputs)


def _with_output(primitive: str) -> Any:
    """A forward that computes one primitive of the back end and saves its output."""

    def forward(be: Any, *inputs: Any) -> Any:
        y = getattr(be, primitive)(*inputs)
        return y, y

    return forward


def _divide_by(be: Any, g: Any, saved: Any, _out: Any) -> Any:
    a, b = saved
    return be.negative(be.divide(be.multiply(g, a), be.multiply(b, b)))


def _power_base(be: Any, g: Any, saved: Any, _out: Any) -> Any:
    a, b, _ = saved
    slope = be.multiply(b, be.power(a, be.subtract(b, 1)))
    return be.multiply(g, be.keep(slope, be.compare("!=", be.broadcast(b, slope.shape), 0)))


def _power_exponent(be: Any, g: Any, saved: Any, _out: Any) -> Any:
    """g y log(a), where y = a^b; 0 where a and y are 0."""
    a, _, y = saved
    base = be.copy(a, be.new(y.shape, y.dtype))
    positive = be.compare("!=", base, 0)
    safe = be.select(positive, base, be.fill(be.new((), y.dtype), 1))
    return be.multiply(g, be.multiply(y, be.log(safe)))


def _power(be: Any, a: Any, b: Any) -> Any:
    y = be.power(a, b)
    return y, (a, b, y)


def _sigmoid(be: Any, g: Any, y: Any, _out: Any) -> Any:
    """g y (1 - y)."""
    slope = be.multiply(y, y)
    return be.multiply(g, be.subtract(y, slope, slope), slope)


def _tanh(be: Any, g: Any, y: Any, _out: Any) -> Any:
    """g (1 - y^2)."""
    slope = be.multiply(y, y)
    return be.subtract(g, be.multiply(g, slope, slope), slope)


def _relu(be: Any, a: Any) -> Any:
    y = be.maximum(a, 0)
    return y, y


def _gelu(be: Any, a: Any) -> Any:
    cdf = be.normal_cdf(a)
    return be.multiply(a, cdf), (a, cdf)


def _gelu_vjp(be: Any, g: Any, saved: Any, _out: Any) -> Any:
    """g (cdf(a) + a pdf(a)), pdf(a) = exp(-a^2 / 2) / sqrt(2 pi)."""
    a, cdf = saved
    slope = be.multiply(a, a)
    slope = be.exp(be.multiply(slope, -0.5, slope), slope)
    slope = be.multiply(be.multiply(slope, 1 / sqrt(2 * pi), slope), a, slope)
    return be.multiply(g, be.add(slope, cdf, slope), slope)


_TANH_SCALE, _TANH_CUBE = sqrt(2 / pi), 0.044715


def _gelu_tanh(be: Any, a: Any) -> Any:
    """a (1 + t) / 2, t = tanh(scale (a + cube a^3)); Hendrycks and Gimpel 2016."""
    t = be.multiply(be.multiply(a, a), _TANH_SCALE * _TANH_CUBE)
    t = be.multiply(be.add(t, _TANH_SCALE, t), a, t)
    t = be.tanh(t, t)
    y = be.multiply(be.add(t, 1), 0.5)
    return be.multiply(y, a, y), (a, t)


def _gelu_tanh_vjp(be: Any, g: Any, saved: Any, _out: Any) -> Any:
    """g ((1 + t) + a (1 - t^2) scale (1 + 3 cube a^2)) / 2."""
    a, t = saved
    inner = be.multiply(be.multiply(a, a), 3 * _TANH_SCALE * _TANH_CUBE)
    inner = be.multiply(be.add(inner, _TANH_SCALE, inner), a, inner)
    slope = be.multiply(inner, be.multiply(t, t))
    slope = be.add(be.subtract(inner, slope, slope), be.add(t, 1), slope)
    return be.multiply(be.multiply(g, 0.5), slope, slope)


def _maximum_share(larger: str, first: int) -> Any:
    """The vjp of one operand of a maximum: all of g where it is the larger, half where both are equal."""

    def vjp(be: Any, g: Any, saved: Any, _out: Any) -> Any:
        operand, other = saved[first], saved[1 - first]
        larger_part = be.keep(g, be.compare(larger, operand, other))
        half = be.keep(be.multiply(g, 0.5), be.compare("==", operand, other))
        return be.add(larger_part, half, larger_part)

    return vjp


def _dropout(be: Any, x: Any, p: float, generator: Any) -> Any:
    """x, each element 0 with probability p, else divided by 1 - p."""
    mask = be.compare(">=", be.uniform(generator, x.shape, x.dtype), p)
    scale = 1 / (1 - p) if p < 1 else 0.0
    return be.multiply(be.keep(x, mask), scale), (mask, scale)


ELEMENTWISE = {
    "add": Rule(_without_saving("add"), (_through, _through)),
    "subtract": Rule(_without_saving("subtract"), (_through, lambda be, g, *_: be.negative(g))),
    "multiply": Rule(
        _with_inputs("multiply"),
        (lambda be, g, s, _: be.multiply(g, s[1]), lambda be, g, s, _: be.multiply(g, s[0])),
    ),
    "divide": Rule(_with_inputs("divide"), (lambda be, g, s, _: be.divide(g, s[1]), _divide_by)),
    "power": Rule(_power, (_power_base, _power_exponent)),
    "maximum": Rule(_with_inputs("maximum"), (_maximum_share(">", 0), _maximum_share(">", 1))),
    "negative": Rule(_without_saving("negative"), (lambda be, g, *_: be.negative(g),)),
    "absolute": Rule(_with_inputs("absolute"), (lambda be, g, s, _: be.multiply(g, be.sign(s[0])),)),
    "exp": Rule(_with_output("exp"), (lambda be, g, y, _: be.multiply(g, y),)),
    "log": Rule(_with_inputs("log"), (lambda be, g, s, _: be.divide(g, s[0]),)),
    "sqrt": Rule(_with_output("sqrt"), (lambda be, g, y, _: be.divide(g, be.multiply(y, 2)),)),
    "tanh": Rule(_with_output("tanh"), (_tanh,)),
    "sigmoid": Rule(_with_output("sigmoid"), (_sigmoid,)),
    "relu": Rule(_relu, (lambda be, g, y, _: be.keep(g, be.compare(">", y, 0)),)),
    "gelu": Rule(_gelu, (_gelu_vjp,)),
    "gelu_tanh": Rule(_gelu_tanh, (_gelu_tanh_vjp,)),
    "select": Rule(
        lambda be, condition, a, b: (be.select(condition, a, b), condition),
        (
            _through,
            lambda be, g, condition, _: be.keep(g, be.broadcast(condition, g.shape)),
            lambda be, g, condition, _: be.keep(g, be.compare("==", be.broadcast(condition, g.shape), False)),
        ),
    ),
    "dropout": Rule(_dropout, (lambda be, g, s, _: be.multiply(be.keep(g, s[0]), s[1]),)),
    "convert": Rule(
        lambda be, x, dtype: (be.copy(x, be.new(x.shape, dtype)), x.dtype),
        (lambda be, g, dtype, _: be.copy(g, be.new(g.shape, dtype)),),
    ),
    "compare": Rule(lambda be, a, b, operator: (be.compare(operator, a, b), None)),
}


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


class _Parts:
    """The vjps of a concatenation, of as many inputs as there are."""

    def __iter__(self) -> Iterator[Vjp]:
        return (partial(_part, i) for i in count())


SHAPES = {
    "reshape": Rule(
        lambda be, x, shape: (be.reshape(x, shape), x.shape), (lambda be, g, shape, _: be.reshape(g, shape),)
    ),
    "transpose": Rule(lambda be, x, axes: (be.transpose(x, axes), axes), (_transpose_back,)),
    "expand": Rule(lambda be, x, shape: (be.broadcast(x, shape), None), (_through,)),
    "concatenate": Rule(_concatenate, _Parts()),
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
    """exp(x - max(x)) over its sum."""
    y = be.subtract(x, be.max(x, (axis,), True))
    be.exp(y, y)
    return be.divide(y, be.sum(y, (axis,), True), y), (y, axis)


def _softmax_vjp(be: Any, g: Any, saved: Any, _out: Any) -> Any:
    """y (g - sum(g y))."""
    y, axis = saved
    partial = be.multiply(g, y)
    total = be.sum(partial, (axis,), True)
    return be.multiply(be.subtract(g, total, partial), y, partial)


def _log_softmax(be: Any, x: Any, axis: int) -> Any:
    y = be.subtract(x, be.max(x, (axis,), True))
    total = be.sum(be.exp(y), (axis,), True)
    return be.subtract(y, be.log(total, total), y), (y, axis)


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
