"""Stochastic gradient descent, with momentum, Nesterov's momentum, and weight decay."""

from __future__ import annotations

from typing import Any

from evener.autodiff.backends.interface import Array
from evener.autodiff.errors import require
from evener.autodiff.optim.optimizer import Optimizer, Parameters


class SGD(Optimizer):
    """p -= lr v, v = momentum v + g + weight_decay p; with Nesterov's momentum p -= lr (g + momentum v).

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        momentum: share of the last step that goes on.
        weight_decay: pull towards 0.
        nesterov: look ahead by the momentum.

    Raises:
        InvalidOperation: an option is negative, or `nesterov` is without momentum.
    """

    states = ("momentum",)

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov})

    def _checked(self, group: dict[str, Any]) -> dict[str, Any]:
        for name in ("lr", "momentum", "weight_decay"):
            require(group[name] >= 0, "{} must be zero or more, got {}", name, group[name])
        require(group["momentum"] > 0 or not group["nesterov"], "nesterov needs a momentum above 0")
        return group

    def _kept(self) -> tuple[str, ...]:
        return self.states if any(group["momentum"] for group in self.param_groups) else ()

    def _update(self, group: dict[str, Any], _step: int, /, p: Array, g: Array, *states: Array, scratch: Array) -> None:
        be, momentum = self.arena.backend, group["momentum"]
        change, work = scratch
        if group["weight_decay"]:
            g = be.add(g, be.multiply(p, group["weight_decay"], change), change)
        if momentum:
            v = be.add(be.multiply(states[0], momentum, states[0]), g, states[0])
            g = be.add(g, be.multiply(v, momentum, work), work) if group["nesterov"] else v
        be.subtract(p, be.multiply(g, group["lr"], change), p)
