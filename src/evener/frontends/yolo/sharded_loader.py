"""Stands for the DataLoader of one process: as many batches, of each this rank's part.

What is drawn for an image follows from the seed, the epoch and the image, so it looks the same on whichever rank it is
loaded. Mosaics choose their other images from the whole data set: Ultralytics chooses among those that this process
loaded lately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from evener.comm.step_timing import StepTimer
from evener.data.loader import collect, open_batches
from evener.data.sampler import MicroBatch, Sampler
from evener.system.memory import usable_memory

_UNBOUNDED = 1 << 40
"""Steps: a trainer may go on for as many as it likes."""
_SPARE = 10
"""One part in so many of the free memory may hold images."""


class ShardedLoader:
    """A rank's part of every batch of a data set, epoch by epoch.

    Args:
        plain: the DataLoader of one process, which is asked what to do and is not run.
        sampler: (nothing) -> of this rank's parts; asked whenever the first step of a row of them is loaded.
        seed: of random transforms.
        epoch: to load, from 0; None where all epochs are alike, and each is loaded again.
        timer: of this rank, for a training; begins to time forward and backward with every batch.
        draws_from_all: whether mosaics choose among all images, or among those that this rank has loaded lately.
        done: the last step, from 1, that is not computed here any more; something stands for its images.

    Attributes:
        dataset: of it.
        sampler: indices of all samples, in order.
        batch_size: samples of a batch over all ranks.
        collate: samples -> a batch.
        part: what was loaded last.
    """

    drop_last = False

    def __init__(
        self,
        plain: Any,
        sampler: Callable[[], Sampler],
        *,
        seed: int,
        epoch: Callable[[], int] | None = None,
        timer: StepTimer | None = None,
        draws_from_all: bool = True,
        done: Callable[[], int] = int,
    ) -> None:
        self.dataset, self.batch_size = plain.dataset, plain.batch_size
        self.sampler, self.num_workers = range(len(plain.dataset)), plain.num_workers
        self.part: MicroBatch | None = None
        self.collate = plain.collate_fn
        self._plain, self._make_sampler, self._seed, self._epoch, self._timer = plain, sampler, seed, epoch, timer
        self._batches: Iterator[tuple[MicroBatch, Any]] | None = None
        self._next, self._draws_from_all, self._done = 1, draws_from_all, done
        self._stand_in: dict[str, Any] | None = None

    def __len__(self) -> int:
        """Batches of an epoch."""
        batches: int = -(-len(self.sampler) // self.batch_size)
        return batches

    def __iter__(self) -> Iterator[Any]:
        """The batches of the epoch that comes now."""
        first = self._epoch() * len(self) + 1 if self._epoch is not None else 1
        if self._next != first or self._epoch is None:
            self._batches = None
        for step in range(first, first + len(self)):
            yield self._any(step) if self._epoch is not None and step <= self._done() else self.read(step)

    def read(self, step: int) -> Any:
        """This rank's part of the batch of `step`, from 1."""
        if self._batches is None or self._next != step:
            self._open(step)
        assert self._batches is not None
        self._time("io")
        self.part, batch = next(self._batches)
        self._next += 1
        self._time("fb")
        return batch

    def _any(self, step: int) -> Any:
        """Some image, the same one each time; only that it is the turn of `step` matters."""
        (self.part,) = self._make_sampler().step(step)
        if self._stand_in is None:
            self._stand_in = collect(self.dataset, np.zeros(1, dtype=np.int64), self._seed, 0, self.collate)
        return dict(self._stand_in)  # preparing a batch changes it

    def reset(self) -> None:
        """The data set has changed: what was loaded ahead is not used."""
        self._batches = None

    def close(self) -> None:
        """End the processes that load."""
        self._batches = None

    def _open(self, first: int) -> None:
        self._batches = None  # its processes end before others start
        if self._draws_from_all:
            draw_from_all(self.dataset)
        self._next = first
        self._batches = open_batches(
            self.dataset,
            self._make_sampler(),
            first=first,
            last=_UNBOUNDED if self._epoch is not None else len(self),
            seed=self._seed,
            workers=self.num_workers,
            pinned=self._plain.pin_memory,
            collate=self.collate,
        )

    def _time(self, phase: str) -> None:
        if self._timer is None:
            return
        self._timer.pause()
        if phase == "fb":
            assert self.part is not None
            self._timer.pace.expect(len(self.part.indices))
            self._timer.resume("fb")
        else:
            self._timer.resume("io")


def spare_bytes(limit_bytes: int | None = None) -> int:
    """Return how many bytes of main memory may hold images; `limit_bytes` is the user's limit for everything."""
    return usable_memory(limit_bytes=limit_bytes)[1] // _SPARE


def keep_images(dataset: Any, nbytes: int) -> None:
    """Have a process that loads `dataset` keep so many bytes of images: any of them may come into a mosaic.

    It keeps no fewer than Ultralytics would, whose mosaics choose among those that are kept.
    """
    most = getattr(dataset, "max_buffer_length", 0)
    if most:  # of training; it drops an image when it has as many as this
        size = dataset.imgsz if isinstance(dataset.imgsz, int) else max(dataset.imgsz)
        dataset.max_buffer_length = max(most, min(len(dataset) + 1, nbytes // (size * size * dataset.channels)))


def draw_from_all(dataset: Any) -> None:
    """Have no transform of `dataset` choose among the images that this process loaded lately."""
    waiting: list[Any] = [getattr(dataset, "transforms", None)]
    while waiting:
        transform = waiting.pop()
        if hasattr(transform, "buffer_enabled"):
            transform.buffer_enabled = False
        waiting += getattr(transform, "transforms", None) or []
        if (inner := getattr(transform, "pre_transform", None)) is not None:
            waiting.append(inner)
