"""Which numbers a run computes with: autocast, loss scaling, and the type of the weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from evener.profile import Precision

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Arithmetic:
    """The arithmetic of one rank at one precision.

    Args:
        precision: fp32 and fp64 compute as they say; bf16 and fp16 by autocast over float32 weights.
        device: that computes.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self._precision, self._device = precision, device
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    def autocast(self) -> AbstractContextManager[Any]:
        """Inside, operations choose their type as the precision says."""
        if self._precision in _AUTOCAST:
            return torch.autocast(self._device.type, dtype=_AUTOCAST[self._precision])
        return nullcontext()

    def prepare_model(self, model: nn.Module, on_device: bool = True) -> nn.Module:
        """The model with weights of the precision's type, on the device or left where it is."""
        dtype = torch.float64 if self._precision == "fp64" else None
        return model.to(self._device if on_device else None, dtype=dtype)

    def prepare(self, value: Any) -> Any:
        """`value` with floating-point tensors widened where the whole run is fp64."""
        if self._precision != "fp64":
            return value
        if isinstance(value, torch.Tensor):
            return value.double() if value.is_floating_point() else value
        if isinstance(value, dict):
            return {key: self.prepare(v) for key, v in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(self.prepare(v) for v in value)
        return value
