"""Function modes that stay active for the rest of a program, and hooks on calls of its models.

Such a mode is outside of all modes that the program enters and leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn, overrides
from torch.overrides import TorchFunctionMode


def begin_mode(mode: TorchFunctionMode) -> None:
    """Activate `mode` in this thread, as the outermost one."""
    _change(lambda modes: [mode, *modes])


def end_mode(mode: TorchFunctionMode) -> None:
    """Deactivate `mode`."""
    _change(lambda modes: [one for one in modes if one is not mode])


def _change(change: Callable[[list[Any]], list[Any]]) -> None:
    """Replace the modes of this thread, from the outermost to the innermost, as `torch.set_default_device` does."""
    stack: Any = overrides
    modes = [stack._pop_mode() for _ in range(stack._len_torch_function_stack())]
    for mode in change(modes[::-1]):
        stack._push_mode(mode)


class _Hook:
    """A hook on a module; copies of the module, and files that the program saves it to, have one that does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # takes any arguments, and is known where Evener is not installed


class ModelCalls:
    """Outermost calls of models, or of modules in them.

    Args:
        enter: called before such a call, with the module and its arguments.
        leave: called after it.
    """

    def __init__(self, enter: Callable[[nn.Module, Any], None], leave: Callable[[], None]) -> None:
        self._enter, self._leave = enter, leave
        self._depth = 0
        self._known: dict[int, nn.Module] = {}
        self._hooks: list[Any] = []

    @property
    def is_inside(self) -> bool:
        """Whether a model is being called."""
        return self._depth > 0

    def follow(self, model: nn.Module) -> None:
        """Follow calls of `model` and of its modules."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if id(module) in self._known:
                self._depth += 1
                if self._depth == 1:
                    self._begin(module, (args, kwargs))

        def leave(module: nn.Module, _args: Any, _outputs: Any) -> None:
            if id(module) in self._known and self._depth:
                self._depth -= 1
                if self._depth == 0:
                    self._leave()

        for module in model.modules():
            self._known[id(module)] = module
            self._hooks.append(module.register_forward_pre_hook(_Hook(enter), with_kwargs=True, prepend=True))
            self._hooks.append(module.register_forward_hook(_Hook(leave), always_call=True))

    def end(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, module: nn.Module, arguments: Any) -> None:
        try:
            self._enter(module, arguments)
        except BaseException:
            self._depth = 0
            raise
