"""Whether a loss is a mean over samples: then that of a batch is that of its parts, each by its number of samples.

The two steps of the self-check cut a batch once, where a loss of other weights (a mean over tokens that are not padded,
classes with weights) may be the same by chance; here it is cut at every place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evener.tracer.nested import map_tensors, tensors_in

_LEAST = 2
"""Samples of a part: of a single one some losses are not defined."""


def off_in_parts(loss: Callable[[Any, Any], Tensor], outputs: Any, targets: Any, fewer: Any) -> float:
    """How far the loss of a batch is off that of its parts, relative; 0 if nobody knows which outputs are of a sample.

    Args:
        loss: (outputs, targets) -> a scalar.
        outputs: of all samples.
        targets: likewise.
        fewer: the outputs of all samples but the last.
    """
    samples = _samples_of(targets)
    if not _is_by_sample(outputs, fewer, samples):
        return 0.0
    whole, worst = float(loss(outputs, targets)), 0.0
    for cut in range(_LEAST, samples - _LEAST + 1):
        parts = [(0, cut), (cut, samples)]
        losses = [float(loss(_cut(outputs, a, b), _cut(targets, a, b))) * (b - a) / samples for a, b in parts]
        worst = max(worst, abs(sum(losses) - whole) / max(abs(whole), 1e-6))
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
