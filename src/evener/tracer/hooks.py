"""Hooks that users register on modules: what those of the forward pass do is operations of its own, like any other.

Where a module is one operation, they run before and after it. A module whose hooks compute its weights (the older
`weight_norm`, `spectral_norm`, pruning) is one operation with them, and so is one with hooks of its backward pass.
"""

from __future__ import annotations

from torch import Tensor, nn

_FORWARD = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_BEFORE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")


def are_followed(module: nn.Module) -> bool:
    """Whether the forward hooks of `module` are operations of their own: they compute none of its weights."""
    return not any(isinstance(value, Tensor) for value in vars(module).values())


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether hooks see, or change, the gradients of `module`."""
    return any(getattr(module, name) for name in _BACKWARD)


def without_followed(module: nn.Module) -> nn.Module:
    """`module`, from which hooks are taken that are operations of their own: whoever runs it has run them, or will."""
    for name in (*_FORWARD, *_BEFORE) if are_followed(module) else ():
        getattr(module, name).clear()
    return module


def drop_backward(module: nn.Module) -> None:
    """Take the backward hooks from `module`, of which no gradient is computed."""
    for name in _BACKWARD:
        getattr(module, name).clear()
