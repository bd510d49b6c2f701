"""Convolution and pooling with NumPy: the inputs of every kernel element are gathered and multiplied as one matrix."""

# ruff: noqa: D102  the interface documents each primitive

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from evener.autodiff.backends.interface import Array, Backend, Shape, Window

TAPS_BYTES = 1 << 21
"""Bytes that a convolution gathers at a time; a complete batch would need kernel height x width times the images."""

_BOOL = np.dtype(bool)


class NumpyImages(Backend):
    """The part of `NumpyBackend` that treats images [N, C, H, W]."""

    def _contiguous(self, a: Array) -> Array:
        return a if a.flags.c_contiguous else self.copy(a, self.new(a.shape, a.dtype))

    def conv2d(self, x: Array, w: Array, window: Window, groups: int) -> tuple[Array, Any]:
        y = self.new((len(x), len(w), *window.results(*x.shape[2:])), x.dtype)
        weight, parts = _by_group(w, groups), _parts(len(x), w, y, groups)
        saved_taps = self._taps(x, window, groups) if len(parts) == 1 else None
        for part in self._one_by_one(parts):
            taps = self._taps(x[part], window, groups) if saved_taps is None else saved_taps
            _from_samples_last(self.matmul(weight, taps), y[part])
        return y, (x, window, saved_taps)

    def conv2d_input(self, g: Array, w: Array, shape: Shape, window: Window, groups: int) -> Array:
        back = _backwards(window)
        if back is not None and prod(g.shape[1:]) <= prod(shape[1:]):  # gathering is cheaper than scattering
            return self.conv2d(g, self._turned(w, groups), back, groups)[0]
        return self._scatter(g, w, shape, window, groups)

    def _scatter(self, g: Array, w: Array, shape: Shape, window: Window, groups: int) -> Array:
        """Add every element of `g` to all positions that it was computed from."""
        weight, out = _by_group(w, groups).transpose(0, 2, 1), self.new(shape, g.dtype)
        _, c, rows, columns = _padded(shape, window)
        for part in self._one_by_one(_parts(len(g), w, g, groups)):
            some = g[part]
            taps = self.matmul(weight, self._samples_last(some, groups))
            taps = taps.reshape(c, *window.kernel, *some.shape[2:], len(some))
            padded = self.zeros((c, rows, columns, len(some)), g.dtype)
            for (i, j), seen in _each_tap(padded.transpose(3, 0, 1, 2), window):
                last = seen.transpose(1, 2, 3, 0)
                np.add(last, taps[:, i, j], last)
            np.copyto(out[part], _inside(padded.transpose(3, 0, 1, 2), window))
        return out

    def _turned(self, w: Array, groups: int) -> Array:
        """Return the kernel of the input gradient: channels and filters exchanged, rotated by 180 degrees."""
        filters, channels, rows, columns = w.shape
        by_group = w.reshape(groups, filters // groups, channels, rows, columns)[..., ::-1, ::-1]
        turned = self.new((groups, channels, filters // groups, rows, columns), w.dtype)
        return self.copy(by_group.transpose(0, 2, 1, 3, 4), turned).reshape(-1, filters // groups, rows, columns)

    def conv2d_weight(self, g: Array, saved: Any, w: Array, groups: int, out: Array | None) -> Array:
        x, window, saved_taps = saved
        total = self.new(w.shape, w.dtype) if out is None else out
        for part in self._one_by_one(_parts(len(g), w, g, groups)):
            taps = self._taps(x[part], window, groups) if saved_taps is None else saved_taps
            columns = self._samples_last(g[part], groups).transpose(0, 2, 1)
            product = self.matmul(taps, columns).transpose(0, 2, 1)  # a fifth faster than with the sides changed
            if part.start == 0:
                np.copyto(_by_group(total, groups), product)
            else:
                np.add(_by_group(total, groups), product, _by_group(total, groups))
        return total

    def _taps(self, x: Array, window: Window, groups: int) -> Array:
        """Return the inputs of every kernel element, [G, C/G * kh * kw, H' * W' * N]; samples last for long runs."""
        n, c, rows, columns = _padded(x.shape, window)
        padded = self.new((c, rows, columns, n), x.dtype)
        if window.padding != (0, 0):
            padded.fill(0)
        np.copyto(_inside(padded.transpose(3, 0, 1, 2), window), x)
        seen = _windows(padded, window)
        taps = self.new((groups, prod(seen.shape[:3]) // groups, prod(seen.shape[3:])), x.dtype)
        np.copyto(taps.reshape(seen.shape), seen)
        return taps

    def _samples_last(self, g: Array, groups: int) -> Array:
        """Return [N, F, H', W'] as [G, F/G, H' * W' * N]."""
        n, filters, rows, columns = g.shape
        last = self.copy(g.transpose(1, 2, 3, 0), self.new((filters, rows, columns, n), g.dtype))
        return last.reshape(groups, filters // groups, rows * columns * n)

    def _one_by_one(self, parts: Sequence[slice]) -> Iterator[slice]:
        """Yield the parts of a batch; memory allocated for one is freed before the next."""
        for part in parts:
            mark = self.mark()
            yield part
            self.rewind(mark)

    def max_pool2d(self, x: Array, window: Window) -> tuple[Array, Any]:
        padded = self._pad(x, window, -np.inf)
        taps = _each_tap(padded, window)
        y = self.copy(next(taps)[1], self.new((*x.shape[:2], *window.results(*x.shape[2:])), x.dtype))
        kind = np.min_scalar_type(window.kernel[0] * window.kernel[1])
        winner = self.fill(self.new(y.shape, kind), 0)
        larger, number = self.new(y.shape, _BOOL), self.new(y.shape, kind)
        for k, (_, seen) in enumerate(taps, start=1):
            np.greater(seen, y, larger)
            np.maximum(winner, np.multiply(larger.view(np.uint8), kind.type(k), number), out=winner)
            np.maximum(y, seen, out=y)
        return y, (winner, window)

    def max_pool2d_input(self, g: Array, saved: Any, shape: Shape) -> Array:
        winner, window = saved
        padded = self.zeros(_padded(shape, window), g.dtype)
        apart = window.stride[0] >= window.reach[0] and window.stride[1] >= window.reach[1]
        for k, (_, seen) in enumerate(_each_tap(padded, window)):
            won = self.compare("==", winner, winner.dtype.type(k))
            if apart:
                self.keep(g, won, seen)
            else:
                np.add(seen, self.keep(g, won), seen)
        return _inside(padded, window)

    def avg_pool2d(self, x: Array, window: Window) -> Array:
        y = self.zeros((*x.shape[:2], *window.results(*x.shape[2:])), x.dtype)
        for _, seen in _each_tap(self._pad(x, window, 0), window):
            np.add(y, seen, y)
        return np.divide(y, window.kernel[0] * window.kernel[1], y)

    def avg_pool2d_input(self, g: Array, shape: Shape, window: Window) -> Array:
        padded = self.zeros(_padded(shape, window), g.dtype)
        share = self.divide(g, window.kernel[0] * window.kernel[1])
        for _, seen in _each_tap(padded, window):
            np.add(seen, share, seen)
        return _inside(padded, window)

    def _pad(self, x: Array, window: Window, value: float) -> Array:
        if window.padding == (0, 0):
            return self._contiguous(x)
        padded = self.fill(self.new(_padded(x.shape, window), x.dtype), value)
        np.copyto(_inside(padded, window), x)
        return padded


def _padded(shape: Shape, window: Window) -> Shape:
    (top, left), (n, c, rows, columns) = window.padding, shape
    return n, c, rows + 2 * top, columns + 2 * left


def _inside(padded: Array, window: Window) -> Array:
    """Return the image without its padding, as a view."""
    top, left = window.padding
    return padded[:, :, top : padded.shape[2] - top, left : padded.shape[3] - left]


def _each_tap(padded: Array, window: Window) -> Iterator[tuple[tuple[int, int], Array]]:
    """Yield the inputs of every kernel element (i, j) in a padded image: a view [N,C,H',W']."""
    rows, columns = window._replace(padding=(0, 0)).results(*padded.shape[2:])
    (down, right), (stride_down, stride_right) = window.dilation, window.stride
    for i in range(window.kernel[0]):
        for j in range(window.kernel[1]):
            top, left = i * down, j * right
            bottom, end = top + stride_down * (rows - 1) + 1, left + stride_right * (columns - 1) + 1
            yield (i, j), padded[:, :, top:bottom:stride_down, left:end:stride_right]


def _windows(padded: Array, window: Window) -> Array:
    """Return all taps of a contiguous padded image [C,H,W,N]: a view [C,kh,kw,H',W',N]."""
    c, *image, n = padded.shape
    rows, columns = window._replace(padding=(0, 0)).results(*image)
    channel, down, right, sample = padded.strides
    strides = (
        channel, down * window.dilation[0], right * window.dilation[1],
        down * window.stride[0], right * window.stride[1], sample,
    )  # fmt: skip
    return np.ndarray((c, *window.kernel, rows, columns, n), padded.dtype, padded.data, 0, strides)


def _by_group(w: Array, groups: int) -> Array:
    """Return a kernel's weights [F, C/G, kh, kw] as matrices [G, F/G, C/G * kh * kw]."""
    return w.reshape(groups, len(w) // groups, -1)


def _backwards(window: Window) -> Window | None:
    """Return the window of outputs that read an input element, if it is dense and covers all elements; else None."""
    (down, right), (top, left) = window.reach, window.padding
    if window.stride != (1, 1) or top >= down or left >= right:
        return None
    return window._replace(padding=(down - 1 - top, right - 1 - left))


def _from_samples_last(product: Array, y: Array) -> None:
    """Write [G, F/G, H' * W' * N] into y[N, F, H', W']."""
    n, filters, rows, columns = y.shape
    np.copyto(y, product.reshape(filters, rows, columns, n).transpose(3, 0, 1, 2))


def _parts(n: int, w: Array, y: Array, groups: int) -> Sequence[slice]:
    """Return slices of a batch whose taps fit a cache, or one slice if the complete batch does."""
    sample_bytes = groups * prod(w.shape[1:]) * prod(y.shape[2:]) * y.itemsize
    count = max(1, min(n, -(-n * sample_bytes // TAPS_BYTES)))
    size = max(1, -(-n // count))
    return [slice(start, min(start + size, n)) for start in range(0, max(n, 1), size)]
