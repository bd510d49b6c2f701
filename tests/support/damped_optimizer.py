"""An optimizer that keeps a number in a Python attribute, as users write them."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import SGD


class Damped(SGD):
    """Divides its steps by a mean of the gradient's size, which it keeps in an attribute."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.size = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.size += sum(float(gradient.square().sum()) for gradient in gradients)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad / (1 + self.size)
