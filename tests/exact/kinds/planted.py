"""Recipes that go wrong on one rank on purpose: what the harness has to notice. No kind of the table."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from exact.recipe import Kind, rows

kind = Kind(__name__)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else -1


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def end(self, x: Any) -> Any:
        return self.head(self.body(x).tanh())


@kind(rows())
class Sound(_Net):
    def forward(self, x: Any) -> Any:
        return self.end(x)


@kind(rows())
class Differs(_Net):
    def forward(self, x: Any) -> Any:
        return self.end(x) * (1 + 1e-6 * (_rank() == 1))


@kind(rows())
class DiffersInEvaluation(_Net):
    def forward(self, x: Any) -> Any:
        return self.end(x) + (0 if self.training else 1e-6 * (_rank() == 1))


@kind(rows())
class DiffersInABuffer(_Net):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.seen += len(x)
        return self.end(x)


@kind(rows())
class Raises(_Net):
    def forward(self, x: Any) -> Any:
        if _rank() == 1:
            raise IndexError("planted")
        return self.end(x)


@kind(rows())
class Sleeps(_Net):
    def forward(self, x: Any) -> Any:
        if _rank() == 1:
            time.sleep(1000)
        return self.end(x)


@kind(rows())
class Ends(_Net):
    def forward(self, x: Any) -> Any:
        if _rank() == 1:
            os._exit(3)
        return self.end(x)
