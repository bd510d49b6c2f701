"""The interface of back ends, which separates differentiation from arithmetic.

A back end is one class that computes these primitives on its own kind of array. Rules, tensors, modules and
optimisers are written on top of them and never touch an array otherwise. What a primitive returns is new memory from
`new`, or a view where its description says so; `out` is an array of the result's shape and type to write into instead.

Shapes: N samples, C channels, F filters, H rows, W columns; K classes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

Shape = tuple[int, ...]
Pair = tuple[int, int]

Array = Any
"""An array of a back end; only the back end accesses its elements."""

NativeType = Any
"""A back end's own name for an element type; it has an `itemsize`."""

Primitive = Callable[..., Any]


class Lease:
    """How long tensors may be used: those made inside an arena until its reset, all others for good.

    Attributes:
        backend: that owns the memory.
        alive: false as soon as the memory may hold something else.
        number: which iteration of its arena this is, from 1; 0 outside any arena.
    """

    __slots__ = ("alive", "backend", "number")

    def __init__(self, backend: Backend, number: int = 0) -> None:
        self.backend, self.alive, self.number = backend, True, number


class Place(threading.local):
    """Where the calling thread's new arrays are allocated.

    Attributes:
        arena: the innermost `Arena` that the thread is in; None outside any.
        lease: of new tensors.
    """

    def __init__(self, lease: Lease) -> None:
        self.arena: Any = None
        self.lease = lease


class Backend:
    """Arrays and all computations on them; a subclass defines every `Primitive` below.

    Attributes:
        name: for messages.
        block: elements that an optimiser treats at a time so that they stay in a cache; 0 for all at once.
        failures: exceptions by which the primitives refuse shapes, types or indices.
        comparisons: == != < <= > >= -> function (a, b, out=).

    Raises:
        TypeError: the subclass lacks a primitive.
    """

    name: str
    block: int
    failures: tuple[type[Exception], ...]
    comparisons: Mapping[str, Primitive]

    def __init__(self) -> None:
        missing = [name for name in primitives() if not hasattr(self, name)]
        if missing:
            raise TypeError(f"{type(self).__name__} is not a complete back end: define {', '.join(missing)}")
        self.permanent = Lease(self)
        self.place = Place(self.permanent)

    # Memory.

    empty: Primitive
    """(shape, dtype): an array with unspecified contents, from the system."""
    allocate: Primitive
    """(num_bytes): a buffer of bytes from the system, aligned to 64 bytes."""
    carve: Primitive
    """(buffer, offset, shape, dtype): the bytes of `buffer` from `offset` on, seen as an array."""
    native: Primitive
    """(dtype): the back end's name of a NumPy type."""
    numpy_type: Primitive
    """(dtype): the NumPy type of a back end's type."""
    from_numpy: Primitive
    """(array): `array` as an array of this back end; shares memory where it can."""
    to_numpy: Primitive
    """(array): `array` as one of NumPy's; shares memory where it can."""
    copy: Primitive
    """(source, out): write `source`, converted and broadcast, into `out`."""
    fill: Primitive
    """(out, value): write `value` everywhere into `out`."""

    # Elementwise, broadcasting, (a, out=None) or (a, b, out=None); both operands of one type, or b a Python number.

    add: Primitive
    subtract: Primitive
    multiply: Primitive
    divide: Primitive
    power: Primitive
    maximum: Primitive
    """Larger of both; NaN where either is NaN."""
    negative: Primitive
    absolute: Primitive
    sign: Primitive
    """-1, 0 or 1."""
    exp: Primitive
    log: Primitive
    sqrt: Primitive
    tanh: Primitive
    sigmoid: Primitive
    """1 / (1 + exp(-a)), without overflow."""
    normal_cdf: Primitive
    """(1 + erf(a / sqrt(2))) / 2, the distribution function of the normal distribution."""
    select: Primitive
    """(condition, a, b): a where `condition`, else b."""
    keep: Primitive
    """(a, condition, out=None): a where `condition`, else 0, even where a is not finite."""

    # Reductions.

    sum: Primitive
    """(a, axes, keepdims, out=None): sum over `axes`."""
    max: Primitive
    """(a, axes, keepdims): largest over `axes`; NaN where one is NaN."""
    argmax: Primitive
    """(a, axis, keepdims): index of the first largest along `axis`, as int64."""

    # Shapes.

    reshape: Primitive
    """(a, shape): the same elements in another shape; a view where it can be."""
    transpose: Primitive
    """(a, axes): a view with axes in another order."""
    broadcast: Primitive
    """(a, shape): a read-only view of a, repeated to `shape`."""
    concatenate: Primitive
    """(arrays, axis): arrays concatenated along `axis`."""
    take: Primitive
    """(a, index): a[index], a view if the index is made of integers, slices, None and Ellipsis."""
    put_add: Primitive
    """(shape, index, values, out=None): zeros, with `values` added at `index`; repeated indices get the sum."""
    take_along: Primitive
    """(a, index, axis): elements of a at `index` along `axis`; the other axes go along."""
    put_along: Primitive
    """(shape, index, values, axis): zeros of `shape`, with `values` added at `index` along `axis`."""
    take_rows: Primitive
    """(table, index): rows table[index]; an index outside the table raises IndexError."""
    pick: Primitive
    """(a, index): a[n, index[n]] for every row n of a[N, K]; an index outside 0..K-1 raises IndexError."""
    unpick: Primitive
    """(shape, index, values): zeros of `shape` [N, K], with values[n] at [n, index[n]] for every row n."""

    # Products, convolution and pooling. A kernel reads x at stride * i + dilation * k - padding.

    matmul: Primitive
    """(a, b, out=None): matrix products of the last two axes; the axes before them broadcast."""
    conv2d: Primitive
    """(x, w, window, groups): x[N,C,H,W] * w[F,C/groups,kh,kw] -> [N,F,H',W'], and what `conv2d_weight` needs."""
    conv2d_input: Primitive
    """(g, w, shape, window, groups): the gradient of x, of `shape`, from that of the result."""
    conv2d_weight: Primitive
    """(g, saved, w, groups, out): the gradient of w from that of the result."""
    max_pool2d: Primitive
    """(x, window): the largest of every window (padding does not count), and what `max_pool2d_input` needs."""
    max_pool2d_input: Primitive
    """(g, saved, shape): the gradient of x, of `shape`: each window's goes to its first largest."""
    avg_pool2d: Primitive
    """(x, window): the mean of every window, zeros of the padding included."""
    avg_pool2d_input: Primitive
    """(g, shape, window): the gradient of x, of `shape`."""

    uniform: Primitive
    """(generator, shape, dtype): numbers in [0, 1), the same on every back end for the same NumPy generator."""

    # Written on the primitives above.

    def new(self, shape: Shape, dtype: NativeType) -> Array:
        """Return an array with unspecified contents, from the thread's arena if one is entered."""
        arena = self.place.arena
        return self.empty(shape, dtype) if arena is None else arena.take(shape, dtype)

    def mark(self) -> Any:
        """Return the position of the thread's arena, for `rewind`."""
        arena = self.place.arena
        return None if arena is None else arena.mark()

    def rewind(self, mark: Any) -> None:
        """Free the arrays of `new` since `mark`: the intermediate arrays of a primitive."""
        if mark is not None:
            mark.arena.rewind(mark)

    def zeros(self, shape: Shape, dtype: NativeType) -> Array:
        """Return an array of zeros."""
        return self.fill(self.new(shape, dtype), 0)

    def compare(self, operator: str, a: Array, b: Array) -> Array:
        """Return the truth values of a `operator` b, one of `comparisons`; b may be a Python number."""
        out = self.new(broadcast_shape(a.shape, getattr(b, "shape", ())), self.native(_BOOL))
        return self.comparisons[operator](a, b, out=out)

    def sum_to(self, a: Array, shape: Shape) -> Array:
        """a summed over the axes that broadcasting added to `shape` or stretched: the gradient of broadcasting."""
        lead = len(a.shape) - len(shape)
        stretched = [lead + i for i, size in enumerate(shape) if size == 1 and a.shape[lead + i] != 1]
        return self.reshape(self.sum(a, (*range(lead), *stretched), True), shape)


_BOOL = np.dtype(bool)


def primitives() -> list[str]:
    """Return the names of all primitives that a back end defines."""
    return [name for name, kind in Backend.__annotations__.items() if kind == "Primitive"]


def unary(function: Callable[..., Any]) -> Primitive:
    """Return the primitive that `function` (a, out=) computes."""

    def primitive(self: Backend, a: Array, out: Array | None = None) -> Array:
        return function(a, out=self.new(a.shape, a.dtype) if out is None else out)

    return primitive


def binary(function: Callable[..., Any]) -> Primitive:
    """Return the primitive that `function` (a, b, out=) computes."""

    def primitive(self: Backend, a: Array, b: Any, out: Array | None = None) -> Array:
        if out is None:
            shape = a.shape
            if b.__class__ is a.__class__ and b.shape != shape:
                shape = broadcast_shape(shape, b.shape)
            out = self.new(shape, a.dtype)
        return function(a, b, out=out)

    return primitive


@lru_cache(maxsize=1024)
def broadcast_shape(a: Shape, b: Shape) -> Shape:
    """Return the shape of an elementwise result. Raises ValueError if the shapes do not broadcast."""
    return np.broadcast_shapes(a, b)


def names_once(index: Any) -> bool:
    """Return whether an index cannot repeat elements, because it has only integers, slices, None and Ellipsis."""
    return all(part is None or part is Ellipsis or isinstance(part, int | slice) for part in index)


class Window(NamedTuple):
    """The window of a convolution or a pooling.

    Result (i, j) reads rows stride * i + dilation * k - padding for k below kernel, and columns alike.

    Attributes:
        kernel: rows and columns of the kernel.
        stride: from one result to the next.
        padding: rows and columns added on both sides.
        dilation: from one element of the kernel to the next.
    """

    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)

    @property
    def reach(self) -> Pair:
        """The number of rows and columns from the first to the last element of the kernel."""
        return self.dilation[0] * (self.kernel[0] - 1) + 1, self.dilation[1] * (self.kernel[1] - 1) + 1

    def results(self, rows: int, columns: int) -> Pair:
        """Return the rows and columns of the result for an image; below 1 if the kernel does not fit."""
        return _results(self, rows, columns)


@lru_cache(maxsize=1024)
def _results(window: Window, rows: int, columns: int) -> Pair:
    (down, right), (top, left), (stride_down, stride_right) = window.reach, window.padding, window.stride
    return (rows + 2 * top - down) // stride_down + 1, (columns + 2 * left - right) // stride_right + 1
