"""Parameters, and the slots that collect their gradients in a flat buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from evener.autodiff.backends.interface import Array
from evener.autodiff.tensors import Tensor

if TYPE_CHECKING:
    from evener.autodiff.parameter_arena import ParameterArena


class Parameter(Tensor):
    """A tensor that a module registers under the name that it is assigned to, and that an optimiser changes."""

    __slots__ = ("_home",)

    def __init__(self, data: Tensor, requires_grad: bool = True) -> None:
        backend, array = data._lease.backend, data._usable()
        if data._lease is not backend.permanent:
            array = backend.copy(array, backend.empty(tuple(array.shape), array.dtype))
        super().__init__(array, backend.permanent)
        self._home: Slot | None = None
        self.requires_grad_(requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Make it collect its gradient, or stop doing so (for a layer that is to stay as it is)."""
        super().requires_grad_(requires_grad)
        if requires_grad and self._home is not None:
            self._edge = self._home
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        return Parameter(super().__deepcopy__(memo).detach(), self.requires_grad)


class Entry(NamedTuple):
    """Where a parameter lies in the flat buffers.

    Attributes:
        name: as the model calls it; its number where no names were given.
        shape: of the parameter.
        offset: of its first element.
        size: number of its elements.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    size: int


class Slot:
    """Collects the gradient of one parameter in its part of the flat gradients."""

    __slots__ = ("arena", "entry", "round", "shape", "view")

    def __init__(self, arena: ParameterArena, entry: Entry, view: Array) -> None:
        self.arena, self.entry, self.view, self.shape = arena, entry, view, entry.shape
        self.round = 0  # the one in which the view was last written; any other means that it holds nothing

    @property
    def changed_at(self) -> int:
        """When any parameter of the arena was last changed."""
        return self.arena.changed_at

    @changed_at.setter
    def changed_at(self, time: int) -> None:
        self.arena.changed_at = time

    @property
    def gradient(self) -> Array | None:
        """The part of the flat gradients; None if nothing was received since the last `zero_grad`."""
        return self.view if self.round == self.arena.round else None

    def destination(self) -> Array | None:
        """The part of the flat gradients, if it holds nothing yet."""
        return None if self.round == self.arena.round else self.view

    def receive(self, gradient: Array) -> None:
        """Add `gradient`, or note that it has been written into `destination()`."""
        backend = self.arena.backend
        if self.round == self.arena.round:
            backend.add(self.view, gradient, self.view)
            return
        if gradient is not self.view:
            backend.copy(gradient, self.view)
        self.round = self.arena.round

    def clear(self) -> None:
        """Forget the gradient."""
        self.round = 0
