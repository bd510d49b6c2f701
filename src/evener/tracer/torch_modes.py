"""What a model sets around some of its operations: gradients off, autocast on or off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class TorchModes:
    """State of this thread that decides how operations run.

    Attributes:
        device_type: that autocast is asked about.
        grad: whether gradients are recorded.
        autocast: its dtype; None if it is off.
    """

    device_type: str
    grad: bool
    autocast: torch.dtype | None

    @classmethod
    def now(cls, device_type: str) -> TorchModes:
        """As it is in this thread."""
        on = torch.is_autocast_enabled(device_type)
        return cls(
            device_type=device_type,
            grad=torch.is_grad_enabled(),
            autocast=torch.get_autocast_dtype(device_type) if on else None,
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, this thread is in this state; gradients stay off where they are off already."""
        cast = torch.autocast(self.device_type, dtype=self.autocast, enabled=self.autocast is not None)
        with cast, torch.set_grad_enabled(self.grad and torch.is_grad_enabled()):
            yield
