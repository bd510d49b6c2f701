"""Memory for the temporaries of one iteration: allocated by moving a pointer, freed all at once.

    arena = Arena()
    for images, labels in batches:
        with arena:                                  # tensors made in here live in the arena
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
            print(loss.item())                       # a number outlives the arena, the tensor does not

Leaving the block takes everything back: the tensors made inside say so when they are used afterwards. The first
iteration finds out how much memory an iteration needs; those that follow ask the system for none. The arena even keeps
the array objects, so that the same request at the same place costs a comparison.
"""

from __future__ import annotations

from math import prod
from types import TracebackType
from typing import NamedTuple

from evener.autodiff.backends.interface import Array, Lease, NativeType, Shape
from evener.autodiff.backends.numpy_backend import default_backend
from evener.autodiff.errors import InvalidOperation

_ALIGNMENT = 64
_SMALLEST = 1 << 16


class Mark(NamedTuple):
    """A position in an arena to which it can be rewound."""

    arena: Arena
    chunk: Array
    offset: int


_Slot = tuple[int, Shape, NativeType, Array, int]


class Arena:
    """Bump allocation for the tensors of the default back end that one thread makes inside `with arena:`.

    Attributes:
        iterations: how often it was entered.
    """

    def __init__(self) -> None:
        self.backend = default_backend()
        self.iterations = 0
        self._lease = Lease(self.backend)
        self._outer: tuple[Arena | None, Lease] | None = None
        self._slots: list[_Slot] = []
        self._next = 0  # slot
        self._offset = 0  # byte, in the chunk
        self._most = 0  # bytes that were out at a time, in the chunk
        self._used = 0  # bytes, in the chunks before
        self._replace_chunk(_SMALLEST)

    @property
    def num_bytes(self) -> int:
        """Bytes of its present chunk."""
        return self._capacity

    def __enter__(self) -> Arena:
        if self._outer is not None:
            raise InvalidOperation("this arena is already entered; make one for each thread or depth")
        place = self.backend.place
        self.iterations += 1
        self._lease = Lease(self.backend, self.iterations)
        self._outer = (place.arena, place.lease)
        place.arena, place.lease = self, self._lease
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        place, outer = self.backend.place, self._outer
        if place.arena is not self or outer is None:
            raise InvalidOperation(
                "arenas must be left in the reverse order of entering, by the thread that entered them"
            )
        place.arena, place.lease = outer
        self._outer = None
        self._reset()

    def take(self, shape: Shape, dtype: NativeType) -> Array:
        """Return an array with unspecified contents, valid until the arena is left."""
        number = self._next
        self._next = number + 1
        if number < len(self._slots):
            offset, old_shape, old_dtype, array, end = self._slots[number]
            if old_shape == shape and old_dtype is dtype and offset == self._offset:
                self._offset = end
                return array
        return self._take_new(number, shape, dtype)

    def mark(self) -> Mark:
        """Return the present position."""
        return Mark(self, self._chunk, self._offset)

    def rewind(self, mark: Mark) -> None:
        """Free the allocations since `mark`, unless the arena has moved to a larger chunk since.

        The slots stay in use: the next request gets a new one, so that the next iteration finds the same slots.
        """
        self._most = max(self._most, self._offset)
        if mark.chunk is self._chunk:
            self._offset = mark.offset

    def _take_new(self, number: int, shape: Shape, dtype: NativeType) -> Array:
        num_bytes = -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if self._offset + num_bytes > self._capacity:
            self._used += max(self._most, self._offset)
            self._replace_chunk(max(num_bytes, 2 * self._capacity))
            number = 0
            self._next = 1
        array = self.backend.carve(self._chunk, self._offset, shape, dtype)
        end = self._offset + num_bytes
        del self._slots[number:]
        self._slots.append((self._offset, shape, dtype, array, end))
        self._offset = end
        return array

    def _replace_chunk(self, capacity: int) -> None:
        """Move to a larger chunk; arrays in the old one keep it alive."""
        self._chunk = self.backend.allocate(capacity)
        self._capacity = capacity
        self._slots.clear()
        self._offset = self._most = 0

    def _reset(self) -> None:
        self._lease.alive = False
        if self._used:  # several chunks were used: allocate a single one that holds them all
            self._replace_chunk(self._used + max(self._most, self._offset))
        self._next = self._offset = self._most = self._used = 0
