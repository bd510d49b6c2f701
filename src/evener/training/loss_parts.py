"""Whether a loss is a mean over samples: then that of a batch is that of its parts, each by its number of samples.

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

_LEAST = 2
"""Samples of a part: of a single one some losses are not defined."""
_SPREAD, _CUTS = 32, 4
"""Samples from all over the data whose targets are looked at, and places where they are cut."""


def _undrawn(_first: int, _last: int) -> AbstractContextManager[Any]:
    """What is drawn is nobody's affair."""
    return nullcontext()


Drawing = Callable[[int, int], AbstractContextManager[Any]]
"""Inside, a sample is given the same random numbers in any part; of the first sample, and the one after the last."""


def off_in_parts(
    loss: Callable[[Any, Any], Tensor], outputs: Any, targets: Any, fewer: Any, drawing: Drawing = _undrawn
) -> float:
    """How far the loss of a batch is off that of its parts, relative; 0 if nobody knows which outputs are of a sample.

    Args:
        loss: (outputs, targets) -> a scalar.
        outputs: of all samples.
        targets: likewise.
        fewer: the outputs of all samples but the last.
        drawing: of what the loss draws, such as a mask.
    """
    samples = _samples_of(targets)
    if not _is_by_sample(outputs, fewer, samples):
        return 0.0
    return _worst(loss, outputs, targets, range(_LEAST, samples - _LEAST + 1), drawing)


def off_over_data(
    loss: Callable[[Any, Any], Tensor],
    outputs: Any,
    targets: Any,
    fewer: Any,
    others: Any,
    drawing: Drawing = _undrawn,
) -> float:
    """The same for targets from all over the data, such as of sentences that are longer than the first ones.

    Args:
        loss: as of `off_in_parts`.
        outputs: of the first samples; they stand for those of the others.
        targets: of the first samples.
        fewer: the outputs of all first samples but the last.
        others: targets of samples from all over the data.
        drawing: as of `off_in_parts`.
    """
    samples, count = _samples_of(targets), _samples_of(others)
    if not _is_by_sample(outputs, fewer, samples) or count < 2 * _LEAST:
        return 0.0
    rows = torch.arange(count) % samples
    repeated = map_tensors(outputs, lambda tensor: tensor[rows.to(tensor.device)])
    try:
        return _worst(loss, repeated, others, range(_LEAST, count - _LEAST + 1, max(1, count // _CUTS)), drawing)
    except Exception:  # such as of targets that do not fit outputs of other samples
        return 0.0


def spread(count: int) -> NDArray[np.int64]:
    """Some samples from all over a data set of `count`."""
    return np.unique(np.linspace(0, count - 1, min(count, _SPREAD)).astype(np.int64))


def _worst(
    loss: Callable[[Any, Any], Tensor], outputs: Any, targets: Any, cuts: Iterable[int], drawing: Drawing
) -> float:
    """How far the loss is off that of its parts, relative, where they are cut at one of the places `cuts`."""

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
    """The first dim of all targets; 0 if they have none in common."""
    sizes = {len(tensor) if tensor.dim() else 0 for tensor in tensors_in(targets)}
    return sizes.pop() if len(sizes) == 1 else 0


def _is_by_sample(outputs: Any, fewer: Any, samples: int) -> bool:
    """Whether every output has a row for every sample."""
    pairs = list(zip(tensors_in(outputs), tensors_in(fewer), strict=False))
    return bool(pairs) and all(
        a.shape[:1] == torch.Size([samples]) and b.shape == torch.Size([samples - 1, *a.shape[1:]]) for a, b in pairs
    )


def _cut(nest: Any, first: int, last: int) -> Any:
    return map_tensors(nest, lambda tensor: tensor[first:last])
