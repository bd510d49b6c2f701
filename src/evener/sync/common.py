"""The weights that all agree on, version after version; a version stays as it is while anybody still reads it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evener.errors import InvalidFile
from evener.sync.agreement import Outer
from evener.sync.cores import Cores
from evener.sync.flat import Flat
from evener.sync.layout import Floats, Layout
from evener.sync.outer import Optimiser


class Page:
    """Memory for one state, which knows whether somebody still reads or fills it."""

    __slots__ = ("_view", "flat")

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self._view: weakref.ref[Any] | None = None

    def lend(self) -> memoryview:
        """The bytes; they are lent until the last reference to them, or to a part of them, is gone."""
        view: NDArray[np.uint8] | None = None if self._view is None else self._view()
        if view is None:
            view = self.flat.memory[:]
            self._view = weakref.ref(view)
        return view.data

    @property
    def is_lent(self) -> bool:
        """Whether somebody holds what `lend` gave."""
        return self._view is not None and self._view() is not None


class Shelf:
    """Pages for states of one layout, used again when nobody holds them."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._pages: list[Page] = []

    def take(self) -> Page:
        """A page that nobody reads, with anything on it."""
        for i, page in enumerate(self._pages):
            if not page.is_lent:
                return self._pages.pop(i)
        return Page(Flat(self._layout))

    def put_back(self, page: Page) -> None:
        """Take `page`, which perhaps is still lent, for another time."""
        self._pages.append(page)


class Common:
    """The common weights and their optimiser.

    Args:
        weights: to begin with; are changed from now on.
        outer: the optimiser.
        cores: that work.
    """

    def __init__(self, weights: Flat, outer: Outer, cores: Cores) -> None:
        self.version = 0
        self.optimiser = Optimiser(outer, weights.layout, cores)
        self._page, self._shelf = Page(weights), Shelf(weights.layout)

    @property
    def weights(self) -> Flat:
        """Of the present version."""
        return self._page.flat

    def lend(self) -> memoryview:
        """The present weights to read, which stay as they are while this is held."""
        return self._page.lend()

    def update(self, change: Flat) -> None:
        """Make the next version."""
        present = self._page
        if present.is_lent:
            self._page = self._shelf.take()
            self._shelf.put_back(present)
        self.optimiser.step(self.version, present.flat, change, into=self._page.flat)
        self.version += 1

    def resume(self, version: int, optimiser: Mapping[str, Floats]) -> None:
        """Take the weights for those of `version`, and the optimiser's arrays for what it remembered then.

        Raises:
            InvalidFile: arrays are missing, or of another shape.
        """
        for name, array in self.optimiser.arrays.items():
            saved = optimiser.get(name)
            if saved is None or saved.shape != array.shape or saved.dtype != array.dtype:
                raise InvalidFile(f"the snapshot has no {name} of the optimiser with {array.size} numbers")
            np.copyto(array, saved)
        self.version = version
