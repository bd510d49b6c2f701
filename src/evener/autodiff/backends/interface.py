"""What a back end has to be able to do: the whole seam between differentiation and arithmetic.

A back end is one class that computes these primitives on its own kind of array. Rules, tensors, modules and
optimisers are written on top of them and never touch an array otherwise. What a primitive returns is new memory from
`new`, or a view where its description says so; `out` is an array of the result's shape and type to write into instead.

Shapes: N samples, C channels, F filters, H rows, W columns; K classes.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from evener.autodiff.backends.shapes import Shape, Window

Array = Any
"""An array of a back end; only the back end itself looks inside."""

NativeType = Any
"""A back end's own name for an element type."""

Elementwise = Callable[..., Array]
"""(a, out=None) or (a, b, out=None)."""


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
    """Where the calling thread's new arrays go.

    Attributes:
        arena: the innermost `Arena` that the thread is in; None outside any.
        lease: of new tensors.
    """

    def __init__(self, lease: Lease) -> None:
        self.arena: Any = None
        self.lease = lease


class Backend(ABC):
    """Arrays, and all that is computed with them.

    Attributes:
        name: for messages.
        block: elements that an optimiser treats at a time so that they stay in a cache; 0 for all at once.
        failures: exceptions by which the primitives refuse shapes, types or indices.
    """

    name: str
    block: int
    failures: tuple[type[Exception], ...]

    def __init__(self) -> None:
        self.permanent = Lease(self)
        self.place = Place(self.permanent)

    # Memory.

    def new(self, shape: Shape, dtype: NativeType) -> Array:
        """An array with unspecified contents, from the thread's arena if it is in one."""
        arena = self.place.arena
        return self.empty(shape, dtype) if arena is None else arena.take(shape, dtype)

    def mark(self) -> Any:
        """Where the thread's arena is now, for `rewind`."""
        arena = self.place.arena
        return None if arena is None else arena.mark()

    def rewind(self, mark: Any) -> None:
        """Take back what `new` has given out since `mark`: the intermediate arrays of a primitive."""
        if mark is not None:
            mark.arena.rewind(mark)

    @abstractmethod
    def empty(self, shape: Shape, dtype: NativeType) -> Array:
        """An array with unspecified contents, from the system."""

    @abstractmethod
    def allocate(self, num_bytes: int) -> Array:
        """A buffer of bytes from the system, aligned to 64 bytes."""

    @abstractmethod
    def carve(self, buffer: Array, offset: int, shape: Shape, dtype: NativeType) -> Array:
        """The bytes of `buffer` from `offset` on, seen as an array."""

    @abstractmethod
    def item_bytes(self, dtype: NativeType) -> int:
        """Bytes of one element."""

    @abstractmethod
    def native(self, dtype: np.dtype[Any]) -> NativeType:
        """The back end's name of a NumPy type."""

    @abstractmethod
    def numpy_type(self, dtype: NativeType) -> np.dtype[Any]:
        """The NumPy type of a back end's type."""

    @abstractmethod
    def from_numpy(self, array: np.ndarray[Any, Any]) -> Array:
        """`array` as an array of this back end; shares memory where it can."""

    @abstractmethod
    def to_numpy(self, array: Array) -> np.ndarray[Any, Any]:
        """`array` as one of NumPy's; shares memory where it can."""

    @abstractmethod
    def copy(self, source: Array, out: Array) -> Array:
        """Write `source`, converted and broadcast, into `out`."""

    @abstractmethod
    def fill(self, out: Array, value: float) -> Array:
        """Write `value` everywhere into `out`."""

    # Elementwise, broadcasting, (a, out) or (a, b, out); both operands of one type, or b a Python number.

    add: Elementwise
    """a + b."""
    subtract: Elementwise
    """a - b."""
    multiply: Elementwise
    """a * b."""
    divide: Elementwise
    """a / b."""
    power: Elementwise
    """a to the power of b."""
    maximum: Elementwise
    """The larger of a and b; NaN where either is."""
    negative: Elementwise
    """-a."""
    absolute: Elementwise
    """|a|."""
    sign: Elementwise
    """-1, 0 or 1."""
    exp: Elementwise
    """e to the power of a."""
    log: Elementwise
    """Natural logarithm."""
    sqrt: Elementwise
    """Square root."""
    tanh: Elementwise
    """Hyperbolic tangent."""
    sigmoid: Elementwise
    """1 / (1 + exp(-a)), without overflow."""
    relu: Elementwise
    """The larger of a and 0."""
    normal_cdf: Elementwise
    """(1 + erf(a / sqrt(2))) / 2, the distribution function of the normal distribution."""

    @abstractmethod
    def compare(self, operator: str, a: Array, b: Array) -> Array:
        """Truth values of a `operator` b, one of == != < <= > >=."""

    @abstractmethod
    def select(self, condition: Array, a: Array, b: Array) -> Array:
        """a where `condition`, else b."""

    @abstractmethod
    def keep(self, a: Array, condition: Array, out: Array | None = None) -> Array:
        """a where `condition`, else 0, whatever a is there."""

    # Reductions.

    @abstractmethod
    def sum(self, a: Array, axes: Shape, keepdims: bool, out: Array | None = None) -> Array:
        """Sum over `axes`."""

    @abstractmethod
    def max(self, a: Array, axes: Shape, keepdims: bool) -> Array:
        """Largest over `axes`; NaN where one is."""

    @abstractmethod
    def argmax(self, a: Array, axis: int, keepdims: bool) -> Array:
        """Index of the first largest along `axis`, as int64."""

    @abstractmethod
    def softmax(self, a: Array, axis: int) -> Array:
        """exp(a) over its sum along `axis`."""

    @abstractmethod
    def log_softmax(self, a: Array, axis: int) -> Array:
        """a less the logarithm of the sum of exp(a) along `axis`."""

    # Shapes.

    @abstractmethod
    def reshape(self, a: Array, shape: Shape) -> Array:
        """The same elements in another shape; a view where it can be."""

    @abstractmethod
    def transpose(self, a: Array, axes: Shape) -> Array:
        """A view with axes in another order."""

    @abstractmethod
    def broadcast(self, a: Array, shape: Shape) -> Array:
        """A read-only view of a, repeated to `shape`."""

    @abstractmethod
    def concatenate(self, arrays: Sequence[Array], axis: int) -> Array:
        """Arrays one behind the other along `axis`."""

    @abstractmethod
    def take(self, a: Array, index: Any) -> Array:
        """a[index], a view if the index is made of integers, slices, None and Ellipsis."""

    @abstractmethod
    def put_add(self, shape: Shape, index: Any, values: Array) -> Array:
        """Zeros of `shape`, with `values` added at `index`; elements named several times get the sum."""

    @abstractmethod
    def take_along(self, a: Array, index: Array, axis: int) -> Array:
        """Elements of a at `index` along `axis`; the other axes go along."""

    @abstractmethod
    def put_along(self, shape: Shape, index: Array, values: Array, axis: int) -> Array:
        """Zeros of `shape`, with `values` added at `index` along `axis`."""

    @abstractmethod
    def take_rows(self, table: Array, index: Array) -> Array:
        """table[index] for whole rows; an index outside the table is refused."""

    @abstractmethod
    def add_rows(self, out: Array, index: Array, rows: Array) -> Array:
        """Add `rows` to the rows of `out` at `index`; a row named several times gets the sum."""

    @abstractmethod
    def pick(self, a: Array, index: Array) -> Array:
        """a[n, index[n]] for every row n of a[N, K]; an index outside 0..K-1 is refused."""

    @abstractmethod
    def unpick(self, shape: Shape, index: Array, values: Array) -> Array:
        """Zeros of `shape` [N, K], with values[n] at [n, index[n]] for every row n."""

    # Products, convolution and pooling. A kernel reads x at stride * i + dilation * k - padding.

    @abstractmethod
    def matmul(self, a: Array, b: Array, out: Array | None = None) -> Array:
        """Matrix products of the last two axes; the axes before them broadcast."""

    @abstractmethod
    def conv2d(self, x: Array, w: Array, window: Window, groups: int) -> tuple[Array, Any]:
        """x[N,C,H,W] * w[F,C/groups,kh,kw] -> [N,F,H',W'], and what `conv2d_weight` needs."""

    @abstractmethod
    def conv2d_input(self, g: Array, w: Array, shape: Shape, window: Window, groups: int) -> Array:
        """The gradient of x, of `shape`, from that of the result."""

    @abstractmethod
    def conv2d_weight(self, g: Array, saved: Any, w: Array, groups: int, out: Array | None) -> Array:
        """The gradient of w from that of the result."""

    @abstractmethod
    def max_pool2d(self, x: Array, window: Window) -> tuple[Array, Any]:
        """The largest of every window (the padding does not count), and what `max_pool2d_input` needs."""

    @abstractmethod
    def max_pool2d_input(self, g: Array, saved: Any, shape: Shape) -> Array:
        """The gradient of x, of `shape`: each window's goes to its first largest."""

    @abstractmethod
    def avg_pool2d(self, x: Array, window: Window) -> Array:
        """The mean of every window, zeros of the padding included."""

    @abstractmethod
    def avg_pool2d_input(self, g: Array, shape: Shape, window: Window) -> Array:
        """The gradient of x, of `shape`."""

    # Chance.

    @abstractmethod
    def uniform(self, generator: np.random.Generator, shape: Shape, dtype: NativeType) -> Array:
        """Numbers in [0, 1), the same on every back end for the same state of the generator."""

    # Written on the primitives above.

    def zeros(self, shape: Shape, dtype: NativeType) -> Array:
        """An array of zeros."""
        return self.fill(self.new(shape, dtype), 0)

    def sum_to(self, a: Array, shape: Shape) -> Array:
        """a summed over the axes that broadcasting added to `shape` or stretched: the gradient of broadcasting."""
        lead = len(a.shape) - len(shape)
        stretched = [lead + i for i, size in enumerate(shape) if size == 1 and a.shape[lead + i] != 1]
        return self.reshape(self.sum(a, (*range(lead), *stretched), True), shape)
