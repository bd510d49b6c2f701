"""Which samples each rank takes in each step: each exactly once an epoch, in an order that the seed alone decides.

An epoch is one permutation of the data, cut into batches and these into micro-batches, as one process would take them;
the ranks share each micro-batch out by a `Division`. So neither the number of ranks nor their shares change what a step
learns from, and a run continued on other nodes goes on with the very next sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from evener.oracle.apportion import NodeCost, apportion
from evener.records.errors import require


class Division:
    """The division of batches among the ranks, which may change from a given step on.

    All ranks hold equal divisions and change them alike. A loader may ask for steps ahead of the current one, so a
    change has to be made for a step that no rank has loaded yet.

    Args:
        costs: cost of samples on every rank, from step 1 on.
    """

    def __init__(self, costs: Sequence[NodeCost]) -> None:
        self._changes: list[tuple[int, tuple[NodeCost, ...]]] = [(1, tuple(costs))]

    def change(self, step: int, costs: Sequence[NodeCost]) -> None:
        """Divide by `costs` from `step` on."""
        self._changes = [c for c in self._changes if c[0] < step]
        self._changes.append((step, tuple(costs)))

    def sizes(self, step: int, count: int) -> tuple[int, ...]:
        """Samples for every rank, in order, of a micro-batch of `count` samples in `step`."""
        return apportion(count, self.costs(step))

    def parts(self, step: int, count: int) -> tuple[int, ...]:
        """Samples for every rank of `count` samples that are taken batch by batch, so that memory sets no limit."""
        return apportion(count, [NodeCost(unit_seconds=worker.unit_seconds) for worker in self.costs(step)])

    def costs(self, step: int) -> tuple[NodeCost, ...]:
        """Cost of samples on every rank in `step`."""
        return next(costs for start, costs in reversed(self._changes) if start <= step)


Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One rank's part of one micro-batch.

    Attributes:
        epoch: from 0.
        step: from 1; that the micro-batch belongs to.
        indices: of this rank's samples in the data set.
        total: samples of the whole step, over all ranks and micro-batches.
        is_last: whether the step ends with it.
    """

    epoch: int
    step: int
    indices: Indices
    total: int
    is_last: bool


class Sampler(Protocol):
    """The order of samples that a loader needs."""

    steps_per_epoch: int

    def step(self, step: int) -> tuple[MicroBatch, ...]:
        """This rank's part of step `step`, from 1, one entry a micro-batch."""
        ...


def permutation(count: int, seed: int, epoch: int) -> Indices:
    """The order of `count` samples in `epoch`, decided by the seed alone."""
    return np.random.default_rng([seed, epoch]).permutation(count).astype(np.int64)


class ShuffledSampler:
    """Samples of data that every rank can read.

    Args:
        count: samples in the data set.
        batch_size: samples of one step; the last of an epoch may have fewer.
        accumulate: micro-batches of one step.
        seed: of the order.
        rank: whose part this is.
        division: how a micro-batch is divided.
    """

    def __init__(
        self, *, count: int, batch_size: int, accumulate: int, seed: int, rank: int, division: Division
    ) -> None:
        require(count > 0, "training samples", count, "at least one")
        self.steps_per_epoch = -(-count // batch_size)
        self._count, self._batch_size, self._accumulate = count, batch_size, accumulate
        self._seed, self._rank, self._division = seed, rank, division
        self._order: tuple[int, Indices] | None = None

    def step(self, step: int) -> tuple[MicroBatch, ...]:
        """This rank's part of step `step`, from 1."""
        epoch, position = divmod(step - 1, self.steps_per_epoch)
        batch = self._epoch(epoch)[position * self._batch_size : (position + 1) * self._batch_size]
        pieces = [piece for piece in _cut(batch, self._accumulate) if len(piece)]
        return tuple(
            MicroBatch(
                epoch=epoch, step=step, indices=self._own(piece, step), total=len(batch), is_last=i == len(pieces) - 1
            )
            for i, piece in enumerate(pieces)
        )

    def _own(self, piece: Indices, step: int) -> Indices:
        sizes = self._division.sizes(step, len(piece))
        start = sum(sizes[: self._rank])
        return piece[start : start + sizes[self._rank]]

    def _epoch(self, epoch: int) -> Indices:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, permutation(self._count, self._seed, epoch))
        return self._order[1]


class OrderedSampler:
    """Samples in the order of the data set, a batch a step, each once: what a validation goes through.

    Args:
        count: samples in the data set.
        batch_size: samples of one step; the last one may have fewer.
        rank: whose part this is.
        sizes: (samples of a step) -> samples of it for every rank, in order.
    """

    def __init__(self, *, count: int, batch_size: int, rank: int, sizes: Callable[[int], Sequence[int]]) -> None:
        require(count > 0, "samples", count, "at least one")
        self.steps_per_epoch = -(-count // batch_size)
        self._count, self._batch_size, self._rank, self._sizes = count, batch_size, rank, sizes

    def step(self, step: int) -> tuple[MicroBatch, ...]:
        """This rank's part of step `step`, from 1."""
        begin = (step - 1) * self._batch_size
        total = min(self._count, begin + self._batch_size) - begin
        sizes = self._sizes(total)
        start = begin + sum(sizes[: self._rank])
        indices = np.arange(start, start + sizes[self._rank], dtype=np.int64)
        return (MicroBatch(epoch=0, step=step, indices=indices, total=total, is_last=True),)


class StationarySampler:
    """Samples of data that stays where it is: every rank draws from its own part only.

    A rank's part of a step is in proportion to its part of the data, so that all come to the end of an epoch together.

    Args:
        parts: every rank's samples, in order of ranks, as made by `class_balanced_shares`.
        batch_size: samples of one step over all ranks, about: each rank's part is rounded for itself.
        accumulate: micro-batches of one step.
        seed: of the order.
        rank: whose part this is.
    """

    def __init__(self, *, parts: Sequence[Indices], batch_size: int, accumulate: int, seed: int, rank: int) -> None:
        count = sum(len(part) for part in parts)
        require(count > 0, "training samples", count, "at least one")
        self.steps_per_epoch = -(-count // batch_size)
        self._parts, self._accumulate, self._seed, self._rank = parts, accumulate, seed, rank
        self._order: tuple[int, Indices] | None = None

    def step(self, step: int) -> tuple[MicroBatch, ...]:
        """This rank's part of step `step`, from 1."""
        epoch, position = divmod(step - 1, self.steps_per_epoch)
        total = sum(len(_nth_of(np.arange(len(part)), position, self.steps_per_epoch)) for part in self._parts)
        indices = _nth_of(self._epoch(epoch), position, self.steps_per_epoch)
        return tuple(
            MicroBatch(epoch=epoch, step=step, indices=piece, total=total, is_last=i == self._accumulate - 1)
            for i, piece in enumerate(_cut(indices, self._accumulate))
        )

    def _epoch(self, epoch: int) -> Indices:
        if self._order is None or self._order[0] != epoch:
            part = self._parts[self._rank]
            order = np.random.default_rng([self._seed, epoch, self._rank]).permutation(len(part))
            self._order = (epoch, np.asarray(part, dtype=np.int64)[order])
        return self._order[1]


def _cut(batch: Indices, pieces: int) -> list[Indices]:
    """`batch` in `pieces` consecutive parts whose sizes differ by at most one, the larger ones first."""
    return np.array_split(batch, pieces)


def _nth_of(values: Indices, n: int, parts: int) -> Indices:
    """Part `n`, from 0, of `parts` about equal consecutive ones."""
    return values[len(values) * n // parts : len(values) * (n + 1) // parts]


def stream(sampler: Sampler, first: int, last: int) -> Iterator[MicroBatch]:
    """All micro-batches of the steps `first` to `last`, both included."""
    for step in range(first, last + 1):
        yield from sampler.step(step)
