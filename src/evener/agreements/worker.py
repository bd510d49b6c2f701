"""The worker's side, without sockets: an engine that computes, and a copy of the weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate
from typing import Protocol

import numpy as np

from evener.agreements.compression import Bytes, Compressor, as_bytes, compressor_for
from evener.agreements.layout import Flat, StateLayout
from evener.agreements.messages import MAX_UNUSED, Answer, Lease, Push
from evener.agreements.settings import AgreementSettings
from evener.agreements.threads import ThreadPool
from evener.agreements.update import Optimiser
from evener.records.errors import require
from evener.records.schema import measured, summable


class Engine(Protocol):
    """A model with its data and, for local steps, its optimizer."""

    @property
    def layout(self) -> StateLayout:
        """Layout of the model's state."""
        ...

    @property
    def unused(self) -> tuple[int, ...]:
        """Indices in the layout of parameters that the last `gradient` did not reach, which no optimizer may update."""
        ...

    def load(self, weights: Flat) -> None:
        """Continue from `weights`, including statistics and counters."""
        ...

    def gradient(self, lease: Lease, into: Flat) -> float:
        """Use the samples of `lease` at once, without changing the parameters.

        Args:
            lease: samples to use.
            into: receives the gradient of the mean loss over these samples as its parameters, and the model's
                statistics and counters afterwards.

        Returns:
            The mean loss.
        """
        ...

    def local_steps(self, lease: Lease, into: Flat) -> float:
        """Use the samples of `lease` in its number of steps, each with the agreement's batch.

        Args:
            lease: samples to use.
            into: receives the model's state afterwards.

        Returns:
            The mean loss over the samples, each as it was when its step began.
        """
        ...


class WorkerReplica:
    """A worker's copy of the weights, and its contributions that are not in the common weights yet.

    Args:
        engine: engine that computes.
        agreement: settings of the agreement.
        cores: threads that pack and unpack.
        clock: seconds, to measure the engine.
    """

    def __init__(
        self,
        engine: Engine,
        agreement: AgreementSettings,
        cores: ThreadPool | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        layout = engine.layout
        self._cores = cores = cores or ThreadPool(1)
        self._engine, self._agreement, self._clock = engine, agreement, clock
        self._push, self._pull = (
            compressor_for(layout, agreement.push, cores),
            compressor_for(layout, agreement.pull, cores),
        )
        self._for_slow_link: Compressor | None = None  # for a slow link
        self._common, self._local, self._after = Flat(layout), Flat(layout), Flat(layout)
        self._outer = Optimiser(agreement.outer, layout, cores) if agreement.sends_merged else None
        self._residual = Flat(layout)
        self._free = [Flat(layout) for _ in range(agreement.depth)]
        self.underway: dict[int, Flat] = {}
        """Unanswered contributions, by the number of their lease."""
        self.version = -1
        """Version of the common weights that it last received."""

    def take(self, answer: Answer, image: memoryview | None) -> None:
        """Take an answer; continue from the new common weights, plus the own progress that they do not contain.

        Raises:
            InvalidValue: the answer is a difference to weights that this replica does not have.
        """
        answered = self.underway.pop(answer.answers, None) if answer.answers is not None else None
        if answered is not None:
            self._free.append(answered)
        if (self._for_slow_link is not None) != (answer.compression != "none"):
            self._for_slow_link = compressor_for(self._engine.layout, answer.compression, self._cores)
        if image is None or answer.contents == "nothing":
            return
        self._learn(answer, as_bytes(image))
        self.version = answer.version
        if self._agreement.contribution == "delta":
            for change in self.underway.values():
                _descend(self._local, change)
        self._engine.load(self._local)

    def _learn(self, answer: Answer, image: Bytes) -> None:
        """Make the common weights the local ones; store them separately only if differences to them may follow."""
        packing = self._for_slow_link or self._pull
        if packing is None:
            np.copyto(self._local.memory, image)
            return
        if self._outer is not None:
            self._follow(self._outer, packing, answer, image)
        elif answer.contents == "weights":
            np.copyto(self._common.memory, image)
        else:
            if answer.base is None:
                self._common.memory.fill(0)
            is_known = answer.base in (None, self.version)
            require(is_known, "base of a difference", answer.base, f"{self.version}, the last pull's")
            packing.unpack_difference(image, self._common)
        self._local.copy_from(self._common)

    def _follow(self, outer: Optimiser, packing: Compressor, answer: Answer, image: Bytes) -> None:
        """Make the server's steps with the merged contributions, or take its weights and its optimizer's state."""
        if answer.contents == "weights":
            arrays = [self._common.memory, *(array.view(np.uint8) for array in outer.arrays.values())]
            ends = list(accumulate(len(array) for array in arrays))
            require(len(image) == ends[-1], "bytes of the weights", len(image), f"{ends[-1]}")
            for array, end in zip(arrays, ends, strict=True):
                np.copyto(array, image[end - len(array) : end])
            return
        require(answer.base == self.version, "base of the changes", answer.base, f"{self.version}, the last pull's")
        size, count = packing.num_bytes, answer.version - self.version
        require(len(image) == count * size, "bytes of the changes", len(image), f"{count * size}")
        is_known = len(answer.unused) in (0, count)
        require(is_known, "unused", len(answer.unused), f"parameters of {count} merged contributions, or empty")
        for number in range(count):
            merged = self._after  # whose contents are not needed between two leases
            packing.unpack(image[number * size : (number + 1) * size], merged)
            unused = frozenset(answer.unused[number]) if answer.unused else frozenset[int]()
            outer.step(self.version + number, self._common, merged, into=self._common, unused=unused)

    def work(self, lease: Lease) -> tuple[Push, memoryview]:
        """Work on `lease`; return the contribution."""
        change = self._free.pop()
        begun = self._clock()
        if self._agreement.contribution == "gradient":
            loss = self._engine.gradient(lease, change)
            seconds, unused = self._clock() - begun, self._engine.unused
            for before, after in zip(self._local.statistics, change.statistics, strict=True):
                np.subtract(before, after, out=after)
            np.subtract(change.counters, self._local.counters, out=change.counters)
        else:
            loss = self._engine.local_steps(lease, self._after)
            seconds, unused = self._clock() - begun, ()
            _difference(self._local, self._after, change)
            self._local, self._after = self._after, self._local
        self.underway[lease.number] = change
        push = Push(number=lease.number, seconds=measured(seconds), loss=summable(loss), unused=unused[:MAX_UNUSED])
        return push, self._packed(change)

    def _packed(self, change: Flat) -> memoryview:
        packing = self._for_slow_link or self._push
        if packing is None:
            return change.memory.data
        image = np.empty(packing.num_bytes, np.uint8)
        packing.pack(change, self._residual, image)
        return image.data


def _difference(before: Flat, after: Flat, out: Flat) -> None:
    """Write the decrease of the floats and the increase of the counters into `out`."""
    for a, b, c in zip(before.floats, after.floats, out.floats, strict=True):
        np.subtract(a, b, out=c)
    np.subtract(after.counters, before.counters, out=out.counters)


def _descend(weights: Flat, change: Flat) -> None:
    """Subtract a `_difference` from `weights`."""
    for a, c in zip(weights.floats, change.floats, strict=True):
        np.subtract(a, c, out=a)
    np.add(weights.counters, change.counters, out=weights.counters)
