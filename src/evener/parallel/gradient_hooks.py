"""The user's hooks on gradients of parameters. They see complete gradients, once a step, as in a single process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from evener.tracer.model_copy import copied_model, rebound


class GradientHooks:
    """Collects the gradient hooks of a model's parameters, which stay in place until `taken_off`.

    Attributes:
        names: Names of the parameters that have hooks.
    """

    def __init__(self, model: nn.Module) -> None:
        hooks = {name: _hooks(parameter) for name, parameter in model.named_parameters()}
        self._hooks = {name: both for name, both in hooks.items() if any(both)}
        self.names = tuple(self._hooks)

    @classmethod
    def taken_off(cls, model: nn.Module) -> GradientHooks:
        """Remove the hooks of `model` and return them: they would otherwise see partial sums."""
        hooks = cls(model)
        for name in hooks.names:
            parameter: Any = model.get_parameter(name)
            parameter._backward_hooks = None
            parameter._post_accumulate_grad_hooks = OrderedDict()  # None would leave the hooks in place
        return hooks

    def run(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Run the hooks on complete gradients, which they may change."""
        if not self._hooks:
            return
        for name, parameter in parameters:
            if name in self._hooks and parameter.grad is not None:
                before, after = self._hooks[name]
                for hook in list(before.values()):
                    changed = hook(parameter.grad)
                    parameter.grad = parameter.grad if changed is None else changed
                for hook in list(after.values()):
                    hook(parameter)


def late_hooks(model: nn.Module) -> list[str]:
    """Return the names of parameters with gradient hooks of the user, which were not there when they were taken off."""
    return [
        name
        for name, parameter in model.named_parameters()
        if any(_is_users(hook) for hooks in _hooks(parameter) for hook in hooks.values())
    ]


def _is_users(hook: Any) -> bool:
    module = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return module.partition(".")[0] != __name__.partition(".")[0]


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Remove hooks that run after accumulation, so that a copy of `model` made inside has none."""
    parameters: list[Any] = list(model.parameters())
    hooks_before = [parameter._post_accumulate_grad_hooks for parameter in parameters]
    for parameter in parameters:
        parameter._post_accumulate_grad_hooks = OrderedDict()
    try:
        yield
    finally:
        for parameter, hooks in zip(parameters, hooks_before, strict=True):
            parameter._post_accumulate_grad_hooks = OrderedDict() if hooks is None else hooks


def _hooks(parameter: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks that run before and after accumulation; the user's handles remove them."""
    none: dict[int, Any] = {}
    before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return none if before is None else before, none if after is None else after


def copied(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a copy of `model` that keeps gradient hooks and computed tensors, unlike `copy.deepcopy`."""
    memo = {} if memo is None else memo
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    twin = copied_model(model, memo)
    twins: list[Any] = list(twin.parameters())
    for parameter, other in zip(model.parameters(), twins, strict=True):
        before, after = _hooks(parameter)
        for hook in before.values():
            other.register_hook(rebound(hook, memo))
        for hook in after.values():
            other.register_post_accumulate_grad_hook(rebound(hook, memo))
    return twin
