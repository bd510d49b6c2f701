"""What a rank computes that has nothing to compute: zeros, tied to the graph, so that it joins the others' backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def nothing(shape: Sequence[int], *tensors: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros of `shape` that depend (with gradients of zero) on all `tensors`.

    Args:
        shape: of the result.
        tensors: what the result would be computed of; at least one.
        dtype: of the result, by default the type in which layers with weights compute.
    """
    dtype = dtype or computing_type(tensors[0])
    tie = torch.stack([tensor.flatten()[:0].sum().to(dtype) for tensor in tensors]).sum()
    return tie.expand(tuple(shape))


def computing_type(x: Tensor) -> torch.dtype:
    """The type in which convolutions and linear layers compute: that of autocast, if it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
