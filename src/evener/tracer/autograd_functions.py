"""Interception of the user's autograd functions: each application becomes one operation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
from torch.autograd import Function

Apply: TypeAlias = Callable[..., Any]
"""A function that applies an autograd function to its arguments."""
Seen: TypeAlias = Callable[[type[Function], Apply, tuple[Any, ...]], Any]
"""Replaces an application: maps (autograd function, its apply, arguments) to outputs."""

_BASE: Any = torch.autograd.function._SingleLevelFunction
"""`Function.apply` calls `apply` of this class (since PyTorch 2.0), even if a model took a reference to it before."""
_LOCK = threading.Lock()
_with_own_backward: WeakSet[Apply] = WeakSet()
_here = threading.local()
_watching: list[Seen] = []


@contextmanager
def applications(seen: Seen) -> Iterator[None]:
    """Replace every application of an autograd function in this thread with a call of `seen`."""
    before = getattr(_here, "seen", None)
    with _LOCK:
        _watching.append(seen)
        _BASE.apply = classmethod(_apply)
    _here.seen = seen
    try:
        yield
    finally:
        _here.seen = before
        with _LOCK:
            _watching.remove(seen)
            if not _watching:
                del _BASE.apply


def _apply(kind: Any, *args: Any) -> Any:
    apply, seen = super(_BASE, kind).apply, getattr(_here, "seen", None)
    return apply(*args) if seen is None else seen(kind, apply, args)


@cache
def applying(kind: Any) -> Apply:
    """Return the function that applies the autograd function `kind`: the target of a node, always the same object."""

    def apply(*args: Any) -> Any:
        return kind.apply(*args)

    apply.__qualname__ = apply.__name__ = kind.__name__
    _with_own_backward.add(apply)
    return apply


def hooking(hook: Callable[[torch.Tensor], Any]) -> Apply:
    """Return the function that returns a tensor whose gradient passes `hook`: the target of a node."""

    def hooked(tensor: torch.Tensor) -> Any:
        made: Any = tensor.view_as(tensor)
        if made.requires_grad:
            made.register_hook(hook)
        return made

    _with_own_backward.add(hooked)
    return hooked


def has_own_backward(target: Any) -> bool:
    """Return whether a node's target has a backward pass of the user, which expects whole gradients."""
    return callable(target) and target in _with_own_backward
