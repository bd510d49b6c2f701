"""Hooks that users put on gradients of parameters: as in one process they see whole, complete ones, once a step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from evener.tracer.model_copy import copied_model, rebound


class GradientHooks:
    """Those of a model's parameters; they stay where they are unless they are taken off.

    Attributes:
        names: of the parameters that have any.
    """

    def __init__(self, model: nn.Module) -> None:
        found = {name: _hooks(parameter) for name, parameter in model.named_parameters()}
        self._hooks = {name: both for name, both in found.items() if any(both)}
        self.names = tuple(self._hooks)

    @classmethod
    def taken_off(cls, model: nn.Module) -> GradientHooks:
        """Those of `model`, whose parameters have none from now on: they would see addends."""
        hooks = cls(model)
        for name in hooks.names:
            parameter: Any = model.get_parameter(name)
            parameter._backward_hooks = None
            parameter._post_accumulate_grad_hooks = OrderedDict()  # None would leave those that are there
        return hooks

    def run(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Let the hooks see, and change, the gradients of parameters that are complete."""
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


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Inside, parameters have no hooks that see a gradient after it is added, so that a copy of `model` has none."""
    parameters: list[Any] = list(model.parameters())
    kept = [parameter._post_accumulate_grad_hooks for parameter in parameters]
    for parameter in parameters:
        parameter._post_accumulate_grad_hooks = OrderedDict()
    try:
        yield
    finally:
        for parameter, hooks in zip(parameters, kept, strict=True):
            parameter._post_accumulate_grad_hooks = OrderedDict() if hooks is None else hooks


def _hooks(parameter: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """Those that see a gradient before, and after, it is added to what is there; the user's handles remove them."""
    none: dict[int, Any] = {}
    before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return none if before is None else before, none if after is None else after


def copied(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A copy of `model`, also with what `copy.deepcopy` loses or refuses: gradient hooks, and computed tensors."""
    memo = {} if memo is None else memo
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    twin = copied_model(model, memo)
    others: list[Any] = list(twin.parameters())
    for own, other in zip(model.parameters(), others, strict=True):
        before, after = _hooks(own)
        for hook in before.values():
            other.register_hook(rebound(hook, memo))
        for hook in after.values():
            other.register_post_accumulate_grad_hook(rebound(hook, memo))
    return twin
