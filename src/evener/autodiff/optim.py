"""Optimizers, one fused pass over the flat buffers: SGD with momentum, Adam (Kingma and Ba 2015), AdamW."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import sqrt
from typing import Any

import numpy as np

from evener.autodiff.backends.interface import Array
from evener.autodiff.errors import StateMismatch, require
from evener.autodiff.parameters import Home, Parameter, arena_of

Parameters = Iterable[Parameter] | Iterable[Mapping[str, Any]]


class Optimizer:
    """Changes parameters by their gradients; subclasses define `_update`.

    Args:
        params: parameters, or groups: dictionaries with `params` and whatever options differ from the defaults.
        defaults: options of the method.

    Attributes:
        param_groups: the groups, as dictionaries; their options, such as `lr`, may be changed between steps.
        arena: the flat buffers of parameters, gradients and state.
    """

    states: tuple[str, ...] = ()
    """Flat buffers that the method keeps for every parameter."""

    def __init__(self, params: Parameters, defaults: dict[str, Any]) -> None:
        self.param_groups = [self._checked(group) for group in _groups(params, defaults)]
        everything = [p for group in self.param_groups for p in group["params"]]
        strangers = [type(p).__name__ for p in everything if not isinstance(p, Parameter)]
        require(not strangers, "an optimizer takes parameters (nn.Parameter), got a {}", *strangers[:1])
        require(len({id(p) for p in everything}) == len(everything), "a parameter must be in one group only")
        self.arena = arena_of(everything)
        self._flats: dict[str, Array] = {}
        self._steps = dict.fromkeys((p._home.entry.offset for p in everything), 0)
        block = self.arena.backend.block or self.arena.size
        self._scratch = self.arena.backend.empty((2, min(block, self.arena.size)), self.arena.values.dtype)

    def zero_grad(self) -> None:
        """Reset the gradients of its parameters."""
        if len(self._steps) == len(self.arena.entries):
            self.arena.zero_grad()
        else:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter._home.leaf.gradient = None

    def step(self) -> None:
        """Change every parameter that has a gradient: one pass over the flat buffers, in blocks that fit the cache."""
        arena = self.arena
        flats = [arena.values, arena._gradients, *(self._state(name) for name in self._kept())]
        length = self._scratch.shape[1]
        for group in self.param_groups:
            for first, last, step in self._runs(group["params"]):
                for start in range(first, last, length):
                    stop = min(start + length, last)
                    blocks = [flat[start:stop] for flat in flats]
                    self._update(group, step, *blocks, scratch=self._scratch[:, : stop - start])
        arena.changed()

    def state_dict(self) -> dict[str, Any]:
        """Return the state: flat arrays by name, and `steps`, the number of steps of each parameter."""
        to_numpy = self.arena.backend.to_numpy
        flats = {name: np.array(to_numpy(self._state(name))) for name in self._kept()}
        return {**flats, "steps": np.array(list(self._steps.values()))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of the same method and model.

        Raises:
            StateMismatch: an array is missing, unknown, or of another size.
        """
        expected = {**dict.fromkeys(self._kept(), self.arena.size), "steps": len(self._steps)}
        sizes = {name: np.size(array) for name, array in state.items()}
        if sizes != expected:
            raise StateMismatch(f"the optimizer's state needs arrays of sizes {expected}, got {sizes}")
        for name in self._kept():
            self.arena.backend.copy(self.arena.backend.from_numpy(np.asarray(state[name])), self._state(name))
        self._steps = dict(zip(self._steps, map(int, state["steps"]), strict=True))

    def _update(self, group: dict[str, Any], step: int, /, p: Array, g: Array, *states: Array, scratch: Array) -> None:
        """Change values p by gradients g; `states` as in `self.states`, `scratch` two rows of the same length."""
        raise NotImplementedError

    def _checked(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return `group` if its options are allowed. Raises InvalidOperation."""
        raise NotImplementedError

    def _kept(self) -> tuple[str, ...]:
        """Return the names in `states` that the options of the groups need."""
        return self.states

    def _state(self, name: str) -> Array:
        """Return the flat buffer `name` of `states`, which is initially zero."""
        if name not in self._flats:
            self._flats[name] = self.arena.zeros()
        return self._flats[name]

    def _runs(self, parameters: list[Parameter]) -> Iterator[tuple[int, int, int]]:
        """Yield runs of adjacent parameters with gradients and equal steps: (first element, behind the last, step).

        In the order of the buffers; counts the step.
        """
        first = last = step = 0
        for home in sorted((p._home for p in parameters if p._home is not None), key=_offset):
            if home.leaf.gradient is None:
                continue
            offset = home.entry.offset
            self._steps[offset] += 1
            if offset != last or self._steps[offset] != step:
                if last > first:
                    yield first, last, step
                first, step = offset, self._steps[offset]
            last = offset + home.entry.size
        if last > first:
            yield first, last, step


def _offset(home: Home) -> int:
    return home.entry.offset


def _groups(params: Parameters, defaults: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return groups with all options; parameters without groups are one group."""
    items: list[Any] = list(params)
    require(bool(items), "an optimizer needs at least one parameter")
    for group in items if isinstance(items[0], Mapping) else [{"params": items}]:
        unknown = group.keys() - defaults.keys() - {"params"}
        require(not unknown, "a group of this optimizer may set {}, got {}", sorted(defaults), sorted(unknown))
        yield {**defaults, **group, "params": list(group["params"])}


def _check_not_negative(group: dict[str, Any], *names: str) -> None:
    for name in names:
        require(group[name] >= 0, "{} must be zero or more, got {}", name, group[name])


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
        _check_not_negative(group, "lr", "momentum", "weight_decay")
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


class _Moments(Optimizer):
    """m and v follow g and g^2; p -= lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)."""

    states = ("exp_avg", "exp_avg_sq")
    decoupled: bool
    """Whether weight decay shrinks the parameters themselves instead of joining the gradient."""

    def _checked(self, group: dict[str, Any]) -> dict[str, Any]:
        _check_not_negative(group, "lr", "eps", "weight_decay")
        fits = all(0 <= beta < 1 for beta in group["betas"])
        require(fits, "betas must be from 0 to below 1, got {}", group["betas"])
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
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})


class AdamW(_Moments):
    """Adam whose weight decay shrinks the parameters themselves, by lr x weight_decay (Loshchilov and Hutter 2019)."""

    decoupled = True

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
