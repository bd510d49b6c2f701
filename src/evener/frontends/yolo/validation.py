"""Validation by all ranks: every batch is divided as in training, and what is found is put in the order of one process.

A validator of Ultralytics keeps something of every image and makes metrics of it at the end. Here the ranks keep what
they found of their images, batch by batch; at the end all are given everything, in the order of the data set, so that
the metrics are those of one process. They are sent as numbers and text: nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from ultralytics.engine.validator import BaseValidator
from ultralytics.models.yolo.classify.val import ClassificationValidator

from evener.comm.group import Group
from evener.records.decoding import decode_msgpack


class PackedArray(msgspec.Struct, frozen=True):
    """An array as it travels."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class ValidationRows(msgspec.Struct, frozen=True):
    """The results of one rank.

    Attributes:
        batches: what was found of this rank's images of each, arrays and text by name.
        predictions: for files of them.
        confusion: counts of classes against classes, where they are wanted.
    """

    batches: list[list[dict[str, PackedArray | str]]]
    predictions: list[dict[str, Any]]
    confusion: PackedArray


class DistributedValidator(BaseValidator):
    """Mixed into the validator of a task by `distributed_validator`; all ranks have one.

    Attributes:
        group: the ranks.
        found: of this rank's images, by batch.
    """

    group: Group
    found: list[list[Mapping[str, Any]]]

    def init_metrics(self, model: Any) -> None:
        """Nothing is found yet; what a task makes of an image is kept."""
        super().init_metrics(model)
        self.found = []
        self.metrics.update_stats = lambda stats: self.found[-1].append(stats)

    def update_metrics(self, preds: Any, batch: dict[str, Any]) -> None:
        """Keep what is found of a batch; one that this rank has no part of counts for nothing."""
        self.found.append([])
        if len(self.dataloader.part.indices):
            super().update_metrics(preds, batch)

    def plot_val_samples(self, batch: dict[str, Any], ni: int) -> None:
        """Draw the leader's part of a batch."""
        if self.group.is_leader:
            super().plot_val_samples(batch, ni)

    def plot_predictions(self, batch: dict[str, Any], preds: Any, ni: int) -> None:
        """Draw what was predicted for it."""
        if self.group.is_leader:
            super().plot_predictions(batch, preds, ni)

    def gather_stats(self) -> None:
        """Count what all ranks found, in the order of the data set."""
        del self.metrics.update_stats  # the metrics' own one is back
        ranks = self._rows_of_all()
        for parts in zip(*(rows.batches for rows in ranks), strict=True):
            for image in (image for part in parts for image in part):
                self.count({name: _unpacked(value) for name, value in image.items()})
        self.jdict = [prediction for rows in ranks for prediction in rows.predictions]
        self.confusion_matrix.matrix = sum(_unpacked(rows.confusion) for rows in ranks)
        self.seen = len(self.dataloader.dataset)
        self.args.plots &= self.group.is_leader

    def count(self, image: Mapping[str, Any]) -> None:
        """Count what was found of an image."""
        self.metrics.update_stats(image)

    def _rows_of_all(self) -> list[ValidationRows]:
        """By rank."""
        batches = [
            [
                {name: value if isinstance(value, str) else _packed(value) for name, value in image.items()}
                for image in row
            ]
            for row in self.found
        ]
        rows_here = ValidationRows(batches, self.jdict or [], _packed(self.confusion_matrix.matrix))
        rows = self.group.all_gather_bytes(msgspec.msgpack.encode(rows_here, enc_hook=lambda number: number.item()))
        return [decode_msgpack(row, ValidationRows) for row in rows]


class DistributedClassificationValidator(DistributedValidator):
    """The validator of a classifier, whose results belong to a rank's whole part of a batch.

    Attributes:
        pred: the best classes of images, by part of a batch.
        targets: the right ones.
    """

    pred: list[torch.Tensor]
    targets: list[torch.Tensor]

    def update_metrics(self, preds: Any, batch: dict[str, Any]) -> None:
        """Keep the best classes and the right one of every image."""
        super().update_metrics(preds, batch)
        self.found[-1] += [
            {"pred": pred.numpy(), "targets": targets.numpy()}
            for pred, targets in zip(self.pred, self.targets, strict=True)
        ]
        self.pred, self.targets = [], []

    def count(self, image: Mapping[str, Any]) -> None:
        """Count what was found of a part of a batch."""
        self.pred.append(torch.from_numpy(image["pred"].copy()))
        self.targets.append(torch.from_numpy(image["targets"].copy()))


def distributed_validator(validator: Any, group: Group) -> Any:
    """Make `validator` one of all ranks of `group`, and return it."""
    is_classifier = isinstance(validator, ClassificationValidator)
    mixin = DistributedClassificationValidator if is_classifier else DistributedValidator
    validator.__class__ = type(f"Distributed{type(validator).__name__}", (mixin, type(validator)), {"group": group})
    return validator


def _packed(value: Any) -> PackedArray:
    array = np.ascontiguousarray(value)
    return PackedArray(array.dtype.str, array.shape, array.tobytes())


def _unpacked(value: PackedArray | str) -> Any:
    if isinstance(value, str):
        return value
    return np.frombuffer(value.data, dtype=np.dtype(value.dtype)).reshape(value.shape)
