"""A copy of a number from the device to the host that does not wait for later work.

`float(tensor)` of a GPU waits for all queued work, including the next step. A copy that is queued right after a step's
work can be read one step later without waiting.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """Copies one number to the host, in the order of the device's work.

    Args:
        value: a tensor of one element, or a number that the host has already.
    """

    def __init__(self, value: Tensor | float) -> None:
        self._value, self._event = value, None
        if isinstance(value, Tensor) and value.device.type != "cpu":
            self._value = value.detach().to("cpu", non_blocking=True)  # into pinned memory
            self._event = torch.Event(value.device)
            self._event.record()

    def read(self) -> float:
        """Return the number; wait only for the work that was queued before the copy."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._value)
