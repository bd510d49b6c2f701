"""How many samples of a batch each rank takes, step by step: one answer on every rank, whoever looks ahead how far."""

from __future__ import annotations

from collections.abc import Sequence

from evener.oracle.apportion import Worker, apportion


class Division:
    """The division of batches among the ranks, which may change from a given step on.

    All ranks hold equal divisions and change them alike. A loader may ask for steps ahead of the current one, so a
    change has to be made for a step that no rank has loaded yet.

    Args:
        workers: cost of samples on every rank, from step 1 on.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._changes: list[tuple[int, tuple[Worker, ...]]] = [(1, tuple(workers))]

    def change(self, step: int, workers: Sequence[Worker]) -> None:
        """Divide by the costs `workers` from `step` on."""
        self._changes = [c for c in self._changes if c[0] < step]
        self._changes.append((step, tuple(workers)))

    def sizes(self, step: int, count: int) -> tuple[int, ...]:
        """Samples for every rank, in order, of a micro-batch of `count` samples in `step`."""
        return apportion(count, self._workers(step))

    def parts(self, step: int, count: int) -> tuple[int, ...]:
        """Likewise of `count` samples that a rank takes one batch after the other, so that memory bounds nothing."""
        return apportion(count, [Worker(unit_seconds=worker.unit_seconds) for worker in self._workers(step)])

    def _workers(self, step: int) -> tuple[Worker, ...]:
        return next(workers for start, workers in reversed(self._changes) if start <= step)
