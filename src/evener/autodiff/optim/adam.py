"""Adam (Kingma and Ba 2015) and AdamW (Loshchilov and Hutter 2019)."""

from __future__ import annotations

from math import sqrt
from typing import Any

from evener.autodiff.backends.interface import Array
from evener.autodiff.errors import require
from evener.autodiff.optim.optimizer import Optimizer, Parameters


class _Moments(Optimizer):
    """m and v follow g and g^2; p -= lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)."""

    states = ("exp_avg", "exp_avg_sq")
    decoupled: bool
    """Whether weight decay shrinks the parameters themselves instead of joining the gradient."""

    def __init__(
        self,
        params: Parameters,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _checked(self, group: dict[str, Any]) -> dict[str, Any]:
        for name in ("lr", "eps", "weight_decay"):
            require(group[name] >= 0, "{} must be zero or more, got {}", name, group[name])
        require(
            all(0 <= beta < 1 for beta in group["betas"]), "betas must be from 0 to below 1, got {}", group["betas"]
        )
        return group

    def _update(self, group: dict[str, Any], step: int, /, p: Array, g: Array, *states: Array, scratch: Array) -> None:
        be, (beta1, beta2), (m, v), (work, gradient) = self.arena.backend, group["betas"], states, scratch
        if group["weight_decay"] and self.decoupled:
            be.multiply(p, 1 - group["lr"] * group["weight_decay"], p)
        elif group["weight_decay"]:
            g = be.add(g, be.multiply(p, group["weight_decay"], gradient), gradient)
        be.add(m, be.multiply(be.subtract(g, m, work), 1 - beta1, work), m)
        be.multiply(be.multiply(g, g, work), 1 - beta2, work)
        be.add(be.multiply(v, beta2, v), work, v)
        be.multiply(be.sqrt(v, work), 1 / sqrt(1 - beta2**step), work)
        be.divide(m, be.add(work, group["eps"], work), work)
        be.subtract(p, be.multiply(work, group["lr"] / (1 - beta1**step), work), p)


class Adam(_Moments):
    """Steps scaled by the size of recent gradients; weight decay joins the gradient.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        betas: how long mean and square of the gradient are remembered.
        eps: added to the root of the square.
        weight_decay: pull towards 0.

    Raises:
        InvalidOperation: an option is out of range.
    """

    decoupled = False

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)


class AdamW(_Moments):
    """Adam whose weight decay shrinks the parameters themselves.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        betas: how long mean and square of the gradient are remembered.
        eps: added to the root of the square.
        weight_decay: share of lr by which parameters shrink in a step.

    Raises:
        InvalidOperation: an option is out of range.
    """

    decoupled = True

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)
