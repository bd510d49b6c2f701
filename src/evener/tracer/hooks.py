"""The user's hooks on modules. Forward hooks are traced as separate operations.

If a module is one operation, its forward hooks run before and after it. A module whose hooks compute its weights (the
older `weight_norm`, `spectral_norm`, pruning) is one operation with them, and so is a module with backward hooks.
"""

from __future__ import annotations

from torch import Tensor, nn

_FORWARD = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_BEFORE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")


def are_traced(module: nn.Module) -> bool:
    """Return whether forward hooks of `module` are separate operations, as they compute none of its weights."""
    return not any(isinstance(value, Tensor) for value in vars(module).values())


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether `module` has hooks that see, or change, its gradients."""
    return any(getattr(module, name) for name in _BACKWARD)


def without_traced_hooks(module: nn.Module) -> nn.Module:
    """Remove the hooks of `module` that are separate operations; the caller runs these itself."""
    for name in (*_FORWARD, *_BEFORE) if are_traced(module) else ():
        getattr(module, name).clear()
    return module


def drop_backward(module: nn.Module) -> None:
    """Remove the backward hooks of `module`, of which no gradient is computed."""
    for name in _BACKWARD:
        getattr(module, name).clear()
