"""Rules of matrix products, of linear layers and convolutions with their bias, and of pooling."""

from __future__ import annotations

from typing import Any

from evener.autodiff.rules.rule import Rule


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
    total = be.zeros(shape, g.dtype) if out is None else be.fill(out, 0)
    return be.add_rows(total, index, g)


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
