"""Rules of the operations that work element by element; all of them broadcast."""

from __future__ import annotations

from math import pi, sqrt
from typing import Any

from evener.autodiff.rules.rule import Rule, through, without_saving


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
        own, other = saved[first], saved[1 - first]
        mine = be.keep(g, be.compare(larger, own, other))
        half = be.keep(be.multiply(g, 0.5), be.compare("==", own, other))
        return be.add(mine, half, mine)

    return vjp


def _dropout(be: Any, x: Any, p: float, generator: Any) -> Any:
    """x, each element 0 with probability p, else divided by 1 - p."""
    kept = be.compare(">=", be.uniform(generator, x.shape, x.dtype), p)
    scale = 1 / (1 - p) if p < 1 else 0.0
    return be.multiply(be.keep(x, kept), scale), (kept, scale)


ELEMENTWISE = {
    "add": Rule(without_saving("add"), (through, through)),
    "subtract": Rule(without_saving("subtract"), (through, lambda be, g, *_: be.negative(g))),
    "multiply": Rule(
        _with_inputs("multiply"),
        (lambda be, g, s, _: be.multiply(g, s[1]), lambda be, g, s, _: be.multiply(g, s[0])),
    ),
    "divide": Rule(_with_inputs("divide"), (lambda be, g, s, _: be.divide(g, s[1]), _divide_by)),
    "power": Rule(_power, (_power_base, _power_exponent)),
    "maximum": Rule(_with_inputs("maximum"), (_maximum_share(">", 0), _maximum_share(">", 1))),
    "negative": Rule(without_saving("negative"), (lambda be, g, *_: be.negative(g),)),
    "absolute": Rule(_with_inputs("absolute"), (lambda be, g, s, _: be.multiply(g, be.sign(s[0])),)),
    "exp": Rule(_with_output("exp"), (lambda be, g, y, _: be.multiply(g, y),)),
    "log": Rule(_with_inputs("log"), (lambda be, g, s, _: be.divide(g, s[0]),)),
    "sqrt": Rule(_with_output("sqrt"), (lambda be, g, y, _: be.divide(g, be.multiply(y, 2)),)),
    "tanh": Rule(_with_output("tanh"), (_tanh,)),
    "sigmoid": Rule(_with_output("sigmoid"), (_sigmoid,)),
    "relu": Rule(_with_output("relu"), (lambda be, g, y, _: be.keep(g, be.compare(">", y, 0)),)),
    "gelu": Rule(_gelu, (_gelu_vjp,)),
    "gelu_tanh": Rule(_gelu_tanh, (_gelu_tanh_vjp,)),
    "select": Rule(
        lambda be, condition, a, b: (be.select(condition, a, b), condition),
        (
            through,
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
