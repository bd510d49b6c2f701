"""Check that a loss is a mean over samples: the loss of a batch is the weighted mean over its parts.

The two steps of the self-check cut a batch once, where a loss of other weights (a mean over tokens that are not padded,
classes with weights) may be the same by chance; here it is cut at every place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evener.tracer.nested import map_tensors, tensors_in

_MIN_SAMPLES = 2
"""Samples of a part: of a single one some losses are not defined."""
_SPREAD, _CUTS = 32, 4
"""Samples from all over the data whose targets are looked at, and places where they are cut."""


def _undrawn(_first: int, _last: int) -> AbstractContextManager[Any]:
    """Return a context that leaves random numbers alone."""
    return nullcontext()


Drawing = Callable[[int, int], AbstractContextManager[Any]]
"""(first, last + 1) -> a context in which a sample draws the same random numbers in any part."""


def off_in_parts(
    loss: Callable[[Any, Any], Tensor], outputs: Any, targets: Any, fewer: Any, drawing: Drawing = _undrawn
) -> float:
    """Return the relative difference between the loss of a batch and that of its parts; 0 if it cannot be cut.

    Args:
        loss: (outputs, targets) -> a scalar.
        outputs: of all samples.
        targets: of all samples.
        fewer: the outputs of all samples but the last.
        drawing: fixes random numbers of the loss, such as a mask.
    """
    samples = _samples_of(targets)
    if not _is_by_sample(outputs, fewer, samples):
        return 0.0
    return _worst(loss, outputs, targets, range(_MIN_SAMPLES, samples - _MIN_SAMPLES + 1), drawing)


def off_over_data(
    loss: Callable[[Any, Any], Tensor],
    outputs: Any,
    targets: Any,
    fewer: Any,
    others: Any,
    drawing: Drawing = _undrawn,
) -> float:
    """Return the same difference for targets from all over the data, such as longer sentences.

    Args:
        loss: see `off_in_parts`.
        outputs: of the first samples; they stand for those of the others.
        targets: of the first samples.
        fewer: the outputs of all first samples but the last.
        others: targets of samples from all over the data.
        drawing: see `off_in_parts`.
    """
    samples, count = _samples_of(targets), _samples_of(others)
    if not _is_by_sample(outputs, fewer, samples) or count < 2 * _MIN_SAMPLES:
        return 0.0
    rows = torch.arange(count) % samples
    repeated = map_tensors(outputs, lambda tensor: tensor[rows.to(tensor.device)])
    try:
        return _worst(
            loss, repeated, others, range(_MIN_SAMPLES, count - _MIN_SAMPLES + 1, max(1, count // _CUTS)), drawing
        )
    except Exception:  # such as of targets that do not fit outputs of other samples
        return 0.0


def off_again(loss: Callable[[Any, Any], Tensor], outputs: Any, targets: Any, drawing: Drawing = _undrawn) -> float:
    """Return the relative difference between two calls of a loss with the same values; one that counts them differs.

    Args:
        loss: see `off_in_parts`.
        outputs: of all samples.
        targets: of all samples.
        drawing: see `off_in_parts`.
    """
    values = []
    for _ in range(2):
        with drawing(0, _samples_of(targets)):
            values.append(float(loss(outputs, targets)))
    return abs(values[1] - values[0]) / max(abs(values[0]), 1e-6)


def spread(count: int) -> NDArray[np.int64]:
    """Return the indices of some samples from all over a data set of `count`."""
    return np.unique(np.linspace(0, count - 1, min(count, _SPREAD)).astype(np.int64))


def _worst(
    loss: Callable[[Any, Any], Tensor], outputs: Any, targets: Any, cuts: Iterable[int], drawing: Drawing
) -> float:
    """Return the largest relative difference between the loss and that of its parts, over all `cuts`."""

    def loss_of(first: int, last: int) -> float:
        with drawing(first, last):
            return float(loss(_cut(outputs, first, last), _cut(targets, first, last)))

    samples, worst = _samples_of(targets), 0.0
    whole = loss_of(0, samples)
    for cut in cuts:
        in_parts = (loss_of(0, cut) * cut + loss_of(cut, samples) * (samples - cut)) / samples
        worst = max(worst, abs(in_parts - whole) / max(abs(whole), 1e-6))
    return worst


def _samples_of(targets: Any) -> int:
    """Return the size of the first dim of all targets; 0 if they differ."""
    sizes = {len(tensor) if tensor.dim() else 0 for tensor in tensors_in(targets)}
    return sizes.pop() if len(sizes) == 1 else 0


def _is_by_sample(outputs: Any, fewer: Any, samples: int) -> bool:
    """Return whether every output has a row for every sample."""
    pairs = list(zip(tensors_in(outputs), tensors_in(fewer), strict=False))
    return bool(pairs) and all(
        a.shape[:1] == torch.Size([samples]) and b.shape == torch.Size([samples - 1, *a.shape[1:]]) for a, b in pairs
    )


def _cut(nest: Any, first: int, last: int) -> Any:
    return map_tensors(nest, lambda tensor: tensor[first:last])
