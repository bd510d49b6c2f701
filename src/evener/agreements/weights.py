"""The common weights, version after version, and the bytes that bring a worker up to date.

A version does not change while it is being read. If changes are compressed, the server keeps a copy of the workers'
weights. It sends the difference of the true weights to that copy, and the copy and the workers change by the decoded
difference, so both hold the same bits; the compression error is part of the next difference. In rounds all workers
change together and share one copy; otherwise each has one of its own.

A difference is not sparse if the server's optimizer has momentum. With `top-k` the server therefore compresses merged
contributions, and all make the same step with the decoded ones, workers on their copies of weights and momentum. They
hold the same bits, since each step rounds every number in the same way on every machine. Of changes of weights, what
compression leaves out is forgotten: the workers continue from weights without it, and find it again. Of gradients it is
added to the next update.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from evener.agreements.compression import Bytes, Compressor, compressor_for
from evener.agreements.layout import Flat, Floats, StateLayout
from evener.agreements.messages import MAX_MERGED, MAX_UNUSED, Contents
from evener.agreements.settings import AgreementSettings, Outer
from evener.agreements.threads import ThreadPool
from evener.agreements.update import Optimiser
from evener.records.errors import InvalidFile


class Buffer:
    """Memory for one state, which knows whether it is still in use."""

    __slots__ = ("_view", "flat")

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self._view: weakref.ref[Any] | None = None

    def lend(self) -> memoryview:
        """Return the bytes, which are in use until the last reference to them, or to a part of them, is gone."""
        view: NDArray[np.uint8] | None = None if self._view is None else self._view()
        if view is None:
            view = self.flat.memory[:]
            self._view = weakref.ref(view)
        return view.data

    @property
    def is_lent(self) -> bool:
        """Whether the result of `lend` is still referenced."""
        return self._view is not None and self._view() is not None


_SPARE_BUFFERS = 2
"""Number of versions of the weights that are kept for reuse when all have received them."""


class BufferPool:
    """Buffers for states of one layout, reused when they are no longer in use."""

    def __init__(self, layout: StateLayout) -> None:
        self._layout = layout
        self._buffers: list[Buffer] = []

    def take(self) -> Buffer:
        """Return a buffer that is not in use, with arbitrary contents."""
        for i, buffer in enumerate(self._buffers):
            if not buffer.is_lent:
                return self._buffers.pop(i)
        return Buffer(Flat(self._layout))

    def put_back(self, buffer: Buffer) -> None:
        """Add `buffer`, which may still be in use, for later reuse."""
        self._buffers.append(buffer)

    def trim(self) -> None:
        """Free most of the buffers that are not in use, if there are more than enough for a reader or two."""
        if len(self._buffers) > _SPARE_BUFFERS:
            spare = [buffer for buffer in self._buffers if not buffer.is_lent]
            self._buffers = [buffer for buffer in self._buffers if buffer not in spare[_SPARE_BUFFERS:]]

    def clear(self) -> None:
        """Free the buffers that were put back."""
        self._buffers.clear()


class CommonWeights:
    """The common weights and their optimizer.

    Args:
        weights: initial weights, which are changed from now on.
        outer: settings of the optimizer.
        cores: threads that compute.
        clip_norm: bound on the norm of a gradient; None for none.
    """

    def __init__(self, weights: Flat, outer: Outer, cores: ThreadPool, clip_norm: float | None = None) -> None:
        self.version = 0
        self.optimiser = Optimiser(outer, weights.layout, cores, clip_norm)
        self._present, self._pool = Buffer(weights), BufferPool(weights.layout)

    @property
    def weights(self) -> Flat:
        """The present weights."""
        return self._present.flat

    def lend(self) -> memoryview:
        """Return the present weights to read, which do not change while the result is referenced."""
        return self._present.lend()

    def update(self, change: Flat, unused: frozenset[int] = frozenset()) -> None:
        """Make the next version; the parameters with indices `unused` do not change."""
        present = self._present
        if present.is_lent:
            self._pool.trim()
            self._present = self._pool.take()
            self._pool.put_back(present)
        self.optimiser.step(self.version, present.flat, change, into=self._present.flat, unused=unused)
        self.version += 1

    def state(self) -> Bytes:
        """Return a copy of the weights, followed by the optimizer's arrays."""
        arrays = [array.view(np.uint8) for array in self.optimiser.arrays.values()]
        return np.concatenate([self.weights.memory, *arrays])

    def resume(self, version: int, optimiser: Mapping[str, Floats]) -> None:
        """Set the version of the weights, and the optimizer's arrays.

        Raises:
            InvalidFile: arrays are missing, or of another shape.
        """
        _restore(self.optimiser.arrays, optimiser)
        self.version = version


def _restore(arrays: Mapping[str, Floats], saved: Mapping[str, Floats]) -> None:
    """Overwrite `arrays` with those of the same names. Raises InvalidFile unless all are there and fit."""
    for name, array in arrays.items():
        stored = saved.get(name)
        if stored is None or stored.shape != array.shape or stored.dtype != array.dtype:
            raise InvalidFile(f"the snapshot has no {name} of the optimizer with {array.size} numbers")
        np.copyto(array, stored)


class Pull(msgspec.Struct, frozen=True):
    """Bytes for a worker, and what they are to those of version `base`; see `Answer.contents`."""

    kind: Contents
    image: memoryview
    base: int | None = None
    unused: tuple[tuple[int, ...], ...] = ()


@dataclass
class Copy:
    """A copy of a worker's weights.

    Attributes:
        flat: weights of the worker.
        version: version that they represent.
        base: version to which `image` is the difference.
        image: encoded difference; None at first.
    """

    flat: Flat
    version: int
    base: int = -1
    image: Bytes | None = None


_ZEROS = -1
"""Version number of zeros."""


_LARGEST = 1e36
"""Largest number that is compressed: the sum of those that share a magnitude has to be a float32."""


class MergedChanges:
    """The merged contributions of the last updates, compressed.

    Args:
        layout: layout of the weights.
        compressor: compressor of the contributions.
        remembers: whether what compression leaves out is added to the next contribution.

    Attributes:
        arrays: parts that compression has left out so far, by name, to save or to overwrite.
    """

    def __init__(self, layout: StateLayout, compressor: Compressor, *, remembers: bool = False) -> None:
        self._compressor, self._limit = compressor, layout.num_bytes
        self._decoded = Flat(layout)
        self._residual = Flat(layout) if remembers else None
        residuals = self._residual.parameters if self._residual is not None else ()
        self.arrays: Mapping[str, Floats] = {f"residual.{array.dtype.name}": array for array in residuals}
        self._changes: deque[tuple[Bytes, tuple[int, ...]]] = deque()
        self._version = 0

    def compressed(self, version: int, change: Flat, unused: Collection[int] = ()) -> Flat:
        """Return `change` as workers will decode it, or `change` itself if it has too large numbers.

        Args:
            version: version of the weights that it changes.
            change: merged contribution, which is finite.
            unused: indices in the layout of parameters that it does not reach.
        """
        if version != self._version:
            self._changes.clear()
        self._version = version + 1
        if _largest(change.parameters) > _LARGEST:
            self._changes.clear()  # all workers receive the weights
            return change
        image = np.empty(self._compressor.num_bytes, np.uint8)
        if self._residual is None:
            self._compressor.pack_once(change, image)
        else:
            self._compressor.pack(change, self._residual, image)
        self._compressor.unpack(image, self._decoded)
        self._changes.append((image, tuple(sorted(unused))))
        if len(self._changes) > MAX_MERGED or len(self._changes) * len(image) > self._limit:
            self._changes.popleft()
        return self._decoded

    def since(self, version: int) -> Pull | None:
        """Return the changes that follow `version` of the weights, one after the other; None if some are gone."""
        num_missed = self._version - version
        if not 0 <= num_missed <= len(self._changes):
            return None
        missed = list(self._changes)[len(self._changes) - num_missed :]
        unused = tuple(places for _, places in missed)
        num_unused = sum(map(len, unused))
        if num_unused > MAX_UNUSED:
            return None
        images = np.concatenate([image for image, _ in missed]) if missed else np.empty(0, np.uint8)
        return Pull("merged", images.data, version, unused if num_unused else ())


def _largest(arrays: Iterable[Floats]) -> float:
    """Return the largest distance of a number from zero."""
    return max((max(float(array.max()), -float(array.min())) for array in arrays if array.size), default=0.0)


class Broadcast:
    """Encodes weights for the workers.

    Args:
        agreement: settings of the agreement, which set the compression.
        common: true weights.
        cores: threads that compress.
    """

    def __init__(self, agreement: AgreementSettings, common: CommonWeights, cores: ThreadPool) -> None:
        self._common = common
        self._compressor = compressor_for(common.weights.layout, agreement.pull, cores)
        self._for_slow_link = compressor_for(common.weights.layout, agreement.slow_link, cores)
        self._is_shared = agreement.staleness == 0
        self._merged: MergedChanges | None = None
        if agreement.sends_merged and self._compressor is not None:
            self._merged = MergedChanges(
                common.weights.layout, self._compressor, remembers=agreement.remembers_gradients
            )
        self._copies: dict[str, Copy] = {}
        self._versions: dict[str, int] = {}

    def update(self, change: Flat, unused: frozenset[int]) -> None:
        """Make the next version of the weights by a merged contribution, as compression leaves it."""
        if self._merged is not None:
            change = self._merged.compressed(self._common.version, change, unused)
        self._common.update(change, unused)

    @property
    def arrays(self) -> Mapping[str, Floats]:
        """Parts of merged contributions that compression has left out, by name; read-only."""
        return {} if self._merged is None else self._merged.arrays

    def resume(self, saved: Mapping[str, Floats]) -> None:
        """Continue with the `arrays` of a snapshot.

        Raises:
            InvalidFile: arrays are missing, or of another shape.
        """
        _restore(self.arrays, saved)

    def pull(self, worker: str, *, is_slow_link: bool = False) -> Pull:
        """Return the bytes for `worker`, which has received everything since it was last forgotten.

        Args:
            worker: name of the worker.
            is_slow_link: whether to use the compression for slow links.
        """
        if is_slow_link and self._for_slow_link is not None:
            return self._for_slow_links(self._for_slow_link, worker)
        if self._compressor is None:
            return Pull("weights", self._common.lend())
        if self._merged is not None:
            return self._merged_since(self._merged, worker)
        copy = self._up_to_date(self._compressor, "" if self._is_shared else worker)
        before = self._versions.get(worker)
        self._versions[worker] = copy.version
        if copy.image is not None and before == copy.base:
            return Pull("difference", copy.image.data, copy.base)
        return Pull("weights", copy.flat.memory.copy().data)

    def forget(self, worker: str) -> None:
        """Send `worker` whole weights next time, since it is gone, or its copy is unknown."""
        self._versions.pop(worker, None)
        self._copies.pop(worker, None)

    def _merged_since(self, merged: MergedChanges, worker: str) -> Pull:
        base, self._versions[worker] = self._versions.get(worker), self._common.version
        if base is not None and (changes := merged.since(base)) is not None:
            return changes
        return Pull("weights", self._common.state().data)

    def _for_slow_links(self, compressor: Compressor, worker: str) -> Pull:
        """Return the difference from the copy of `worker` to the weights; from zeros if its copy is unknown."""
        if (copy := self._copies.get(worker)) is None:
            copy = self._copies[worker] = Copy(Flat(self._common.weights.layout), _ZEROS)
        base, copy.version = copy.version, self._common.version
        image = np.empty(compressor.num_bytes, np.uint8)
        compressor.pack_difference(self._common.weights, copy.flat, image)
        return Pull("difference", image.data, None if base == _ZEROS else base)

    def _up_to_date(self, compressor: Compressor, key: str) -> Copy:
        version = self._common.version
        if key not in self._copies:
            self._copies[key] = Copy(self._common.weights.copy(), version)
        copy = self._copies[key]
        if copy.version != version:
            copy.base, copy.version = copy.version, version
            copy.image = np.empty(compressor.num_bytes, np.uint8)
            compressor.pack_difference(self._common.weights, copy.flat, copy.image)
        return copy
