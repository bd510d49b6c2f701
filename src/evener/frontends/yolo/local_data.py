"""Data of Ultralytics for a node that trains by itself: what is drawn for an image follows from it and the epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset

from evener.data.loader import Collate
from evener.frontends.yolo.cut_loader import draw_from_all, keep_images, spare_bytes


class LocalData(Dataset[Any]):
    """Images as they are in an epoch; batches are ((batch of Ultralytics,), no targets).

    Args:
        dataset: of Ultralytics.
        collate: samples of it -> a batch of it.
        closing: epoch in which mosaics are closed, from 0; None: never.
        close: does so.
        begin: is told of every epoch that comes.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collate,
        *,
        closing: int | None = None,
        close: Callable[[], None] | None = None,
        begin: Callable[[int], None] | None = None,
    ) -> None:
        self._dataset, self._collate = dataset, collate
        self._closing, self._close, self._begin = closing, close, begin
        self._epoch: int | None = None
        keep_images(dataset, spare_bytes())
        draw_from_all(dataset)

    def __len__(self) -> int:
        """Images."""
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        """An image, transformed, with its labels."""
        return self._dataset[index]

    def set_epoch(self, epoch: int) -> None:
        """What is asked for next belongs to `epoch`; mosaics that were closed stay so."""
        if epoch == self._epoch:
            return
        self._epoch = epoch
        if self._begin is not None:
            self._begin(epoch)
        if self._close is not None and self._closing is not None and epoch >= self._closing:
            self._close()
            self._close = None
            draw_from_all(self._dataset)

    def collate_fn(self, samples: list[Any]) -> tuple[tuple[Any], tuple[()]]:
        """A batch as a task has it: arguments of the model, and targets."""
        return (self._collate(samples),), ()
