"""Tensors: NumPy's arithmetic (or another back end's) with PyTorch's names, and a record of what was computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Self

import numpy as np

from evener.autodiff.backends.interface import Array, Backend, Lease
from evener.autodiff.errors import InvalidOperation, NoGradient, require
from evener.autodiff.graph import Leaf, Node, backward, clock, mode
from evener.autodiff.rules import RULES
from evener.autodiff.tensors.base import DEFAULT_FLOAT, DEFAULT_INTEGER, TensorBase, check_type, expired
from evener.autodiff.tensors.operations import Operations


class Tensor(Operations):
    """An array of numbers that remembers how it was computed; make one with `tensor`, `from_numpy`, `zeros`, `randn`.

    Names and meanings are PyTorch's. Element types are `bool`, integers, `float32` (for numbers that nothing else is
    said of) and `float64`; a tensor never changes its type by itself, except as PyTorch's does.
    """

    __slots__ = ()

    @property
    def requires_grad(self) -> bool:
        """Whether backward computes a gradient for it, or through it."""
        return self._edge is not None

    @property
    def is_leaf(self) -> bool:
        """Whether it was made, not computed."""
        return type(self._edge) is not Node

    @property
    def grad(self) -> Tensor | None:
        """The gradient that backward calls have added up; only a leaf keeps one."""
        if not isinstance(self._edge, Leaf) or self._edge.gradient is None:
            return None
        return Tensor(self._edge.gradient, self._lease)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if not isinstance(self._edge, Leaf):
            raise NoGradient("a gradient can be set only for a leaf that requires one")
        self._edge.gradient = None
        if value is not None:
            require(value.shape == self.shape, "the gradient must have shape {}, got {}", self.shape, value.shape)
            self._edge.receive(value.to(self.dtype)._usable())

    # Elements and shape.

    def size(self, dim: int | None = None) -> Any:
        """Its shape, or the size of one dimension."""
        return self.shape if dim is None else self.shape[self._dim(dim)]

    def dim(self) -> int:
        """Number of dimensions."""
        return self.ndim

    def numel(self) -> int:
        """Number of elements."""
        return prod(self._array.shape)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Its elements. Shares memory outside an arena; inside one it is a copy, which outlives the arena."""
        if self._edge is not None:
            raise InvalidOperation("a tensor that requires a gradient has no numpy(); call detach().numpy()")
        array: np.ndarray[Any, Any] = self._lease.backend.to_numpy(self._usable())
        return array if self._lease.number == 0 else array.copy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.numpy(), dtype, copy=copy)

    def item(self) -> Any:
        """The only element, as a Python number."""
        require(self.numel() == 1, "item() needs exactly one element; the tensor has shape {}", self.shape)
        return self._lease.backend.to_numpy(self._usable()).item()

    def tolist(self) -> Any:
        """Its elements as nested lists of Python numbers."""
        return self._lease.backend.to_numpy(self._usable()).tolist()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    __index__ = __int__

    def __bool__(self) -> bool:
        return bool(self.item())

    def __repr__(self) -> str:
        if not self._lease.alive:
            return f"tensor(of iteration {self._lease.number} of an arena, which is over)"
        body = np.array2string(self._lease.backend.to_numpy(self._array), separator=", ", prefix="tensor(")
        notes = [] if self.dtype in (DEFAULT_FLOAT, DEFAULT_INTEGER, bool) else [f"dtype={self.dtype}"]
        return f"tensor({', '.join([body, *notes, *['requires_grad=True'] * (self._edge is not None)])})"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Self]:
        return (self[i] for i in range(len(self)))

    # Copies and conversions.

    def detach(self) -> Tensor:
        """The same elements, not connected with the graph."""
        return Tensor(self._usable(), self._lease)

    def clone(self) -> Tensor:
        """A copy; gradients flow through it."""
        return self._apply("convert", (), self._usable().dtype)

    def float(self) -> Tensor:
        """Converted to float32."""
        return self.to(np.float32)

    def double(self) -> Tensor:
        """Converted to float64."""
        return self.to(np.float64)

    def long(self) -> Tensor:
        """Converted to int64."""
        return self.to(np.int64)

    def copy_(self, source: Any) -> Tensor:
        """Write the elements of a tensor or an array into this leaf, under `no_grad` if it requires a gradient."""
        if not self.is_leaf or (self.requires_grad and mode.enabled):
            raise InvalidOperation("copy_ would hide a change from the graph; write to leaves, inside no_grad()")
        backend = self._lease.backend
        array = source._usable() if isinstance(source, Tensor) else backend.from_numpy(np.asarray(source))
        require(tuple(array.shape) == self.shape, "copy_ needs shape {}, got {}", self.shape, tuple(array.shape))
        array_of_leaf = self._usable()
        try:
            backend.copy(array, array_of_leaf)
        except backend.failures as error:
            raise InvalidOperation(f"copy_ needs memory that may be written to: {error}") from error
        if isinstance(self._edge, Leaf):
            self._edge.changed_at = next(clock)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        require(self.is_leaf, "only leaves can be copied deeply; use clone() or detach()")
        backend = self._lease.backend
        copied = Tensor(backend.copy(self._usable(), backend.empty(self.shape, self._array.dtype)), backend.permanent)
        return copied.requires_grad_(self.requires_grad)

    def _become(self, dtype: Any) -> None:
        """Convert this leaf itself, before it lies in an arena."""
        require(getattr(self, "_home", None) is None, "convert a model before creating its optimizer")
        wanted, backend = self._lease.backend.native(check_type(dtype)), self._lease.backend
        self._array = backend.copy(self._array, backend.empty(self.shape, wanted))

    # Gradients.

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Make a leaf collect its gradient, or stop doing so; returns it."""
        require(self.is_leaf, "only a leaf can change whether it requires a gradient; use detach()")
        if requires_grad and self._edge is None:
            require(self.dtype.kind == "f", "only floating-point tensors have gradients; this one holds {}", self.dtype)
            self._edge = Leaf(self.shape, self._lease)
        elif not requires_grad:
            self._edge = None
        return self

    def backward(self, gradient: Tensor | None = None, retain_graph: bool = False) -> None:
        """Add to the `grad` of every leaf the gradient of this tensor, or of sum(self * gradient).

        Args:
            gradient: of this tensor's shape; may be left out if it has a single element.
            retain_graph: keep the graph, so that backward can walk it again.

        Raises:
            NoGradient: nothing that it was computed from requires a gradient, or `gradient` is missing.
            GraphFreed: an earlier backward has freed the graph.
            ParameterChanged: a parameter was changed since the forward pass.
        """
        edge = self._edge
        if edge is None:
            raise NoGradient("no input of this tensor requires a gradient, or it was computed inside no_grad()")
        seed = self._seed(gradient)
        if isinstance(edge, Node):
            backward(edge, seed, retain_graph)
        else:
            edge.receive(seed)

    def _seed(self, gradient: Tensor | None) -> Array:
        array = self._usable()
        if gradient is not None:
            require(isinstance(gradient, Tensor), "a gradient is a tensor, got {}", type(gradient).__name__)
            require(gradient.shape == self.shape, "the gradient must have shape {}, got {}", self.shape, gradient.shape)
            return gradient.to(self.dtype)._usable()
        if self.numel() != 1:
            raise NoGradient(f"backward() of a tensor of shape {self.shape} needs a gradient of that shape, or a sum")
        backend = self._lease.backend
        return backend.fill(backend.new(array.shape, array.dtype), 1)

    def _apply(self, rule: str, others: tuple[TensorBase, ...] = (), *arguments: Any) -> Tensor:
        return apply(rule, (self, *others), *arguments)

    def _made(self, array: Array) -> Tensor:
        return Tensor(array, self._lease.backend.place.lease)


def apply(name: str, inputs: Sequence[TensorBase | None], *arguments: Any) -> Tensor:
    """The row `name` of the table of rules, computed for `inputs` and, if one of them requires a gradient, recorded.

    Args:
        name: of a row of `RULES`.
        inputs: tensors of one back end, or None where an input is left out; the first is a tensor.
        arguments: what else the rule's forward takes.

    Raises:
        InvalidOperation: the inputs do not go together.
        TensorExpired: an input's arena has been reset.
    """
    rule = RULES[name]
    backend = inputs[0]._lease.backend  # type: ignore[union-attr]
    arrays: list[Any] = []
    edges: list[Any] = []
    recorded = False
    for tensor in inputs:
        if tensor is None:
            arrays.append(None)
            edges.append(None)
            continue
        lease = tensor._lease
        if not lease.alive or lease.backend is not backend:
            raise _unusable(name, lease, backend)
        arrays.append(tensor._array)
        edge = tensor._edge
        edges.append(edge)
        if edge is not None:
            recorded = True
    try:
        output, saved = rule.forward(backend, *arrays, *arguments)
    except backend.failures as error:
        raise _refused(name, inputs, error) from error
    lease = backend.place.lease
    if recorded and rule.vjps and mode.enabled:
        return Tensor(output, lease, Node(rule, edges, saved, output.shape, lease))
    return Tensor(output, lease)


def _refused(name: str, inputs: Sequence[TensorBase | None], error: Exception) -> InvalidOperation:
    operands = " and ".join(f"{x.dtype}{list(x.shape)}" for x in inputs if x is not None)
    return InvalidOperation(f"{name} of {operands}: {error}")


def _unusable(name: str, lease: Lease, backend: Backend) -> Exception:
    if not lease.alive:
        return expired(lease)
    return InvalidOperation(f"{name} needs tensors of one back end, got {backend.name} and {lease.backend.name}")
