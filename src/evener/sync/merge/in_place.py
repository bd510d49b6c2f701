"""Merging in place on the device, as published: key by key, first all are added up, then the sum is divided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


@torch.no_grad()
def merge_in_place(states: Sequence[Mapping[str, Tensor]]) -> None:
    """Turn the first of `states` into their mean; counters, those with `tracked` in their key, are summed.

    Args:
        states: with the same keys, all on one device; nothing is copied.
    """
    first, *others = states
    for key, total in first.items():
        for other in others:
            total.add_(other[key])
        if "tracked" not in key:
            total.div_(len(states))
