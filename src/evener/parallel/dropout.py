"""Dropout of a divided value: the mask of the whole is drawn on every rank alike, and each takes its part.

So the result is that of one process, if the ranks' random generators are in one state: they are compared (`agree.py`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from evener.oracle.division.layout import Region, Shape
from evener.parallel.moving import part_of


def dropout(x: Tensor, probability: float, shape: Shape, region: Region, samples: tuple[int, int]) -> Tensor:
    """What is left of this rank's part `x` of a value.

    Args:
        x: this rank's part.
        probability: of a number to be dropped.
        shape: of the replica's value.
        region: of it that this rank has.
        samples: first one of this replica, and number over all replicas.
    """
    first, total = samples
    mask = F.dropout(torch.ones((total, *shape[1:]), dtype=x.dtype, device=x.device), probability)
    own = mask[first : first + shape[0]] if total >= first + shape[0] else mask[:1]  # a stand-in for no samples
    return x * part_of(own, region).clone()  # a view would keep all of the mask
