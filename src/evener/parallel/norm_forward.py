"""Replacement of the computation of norms: the modules stay the same objects, and only their `forward` is replaced.

Class, attributes, hooks and names in a state dict stay those of PyTorch. So a program can still find norms by class,
freeze them, change their momentum or reset their statistics. A copy of a norm, such as a moving average, has the same
computation; a norm loaded from a pickle is plain.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from evener.records.errors import InvalidInput


class NormComputation(Protocol):
    """A way to compute norms."""

    def compute(self, norm: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the output of `norm`, whose class computes it with `forward`."""
        ...


def norms_with_statistics(model: nn.Module) -> dict[str, Any]:
    """Return by name the norms in `model` with statistics: BatchNorms, and InstanceNorms with running statistics."""
    norms = ((name, module) for name, module in model.named_modules() if isinstance(module, _NormBase))
    return {name: norm for name, norm in norms if isinstance(norm, _BatchNorm) or norm.running_mean is not None}


def compute_by(norm: Any, computation: NormComputation) -> None:
    """Compute `norm` with `computation` from now on, in place of any earlier computation.

    Raises:
        InvalidInput: The class of `norm` exchanges statistics itself.
    """
    if isinstance(norm, nn.SyncBatchNorm) and type(norm).forward not in (nn.SyncBatchNorm.forward, _BatchNorm.forward):
        raise InvalidInput(
            f"{type(norm).__name__} is a SyncBatchNorm that overrides forward, which would exchange statistics "
            "twice: make it a subclass of BatchNorm1d, BatchNorm2d or BatchNorm3d"
        )
    before = vars(norm).get("forward")
    if isinstance(before, _NormForward):
        before = before.before
    vars(norm)["forward"] = _NormForward(norm, computation, before)


class _NormForward:
    """Replaces the `forward` of one norm, without keeping the norm alive: a model is freed with its last reference.

    A deep copy belongs to the copy of the norm. A pickle stores the `forward` of the norm's class.
    """

    def __init__(self, norm: Any, computation: NormComputation, before: Any) -> None:
        self._norm = weakref.ref(norm)
        self.computation, self.before = computation, before
        self.compute = computation.compute

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        norm = self._norm()
        return self.compute(norm, _original_forward(norm, self.before), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _NormForward:
        copy = _NormForward(memo.get(id(self._norm()), self._norm()), self.computation, self.before)
        copy.compute = self.compute
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._norm(), "forward")


def computation_of(module: Any) -> Any:
    """Return the computation set by `compute_by`; None if the class of `module` computes it."""
    forward = getattr(module, "__dict__", {}).get("forward")
    return forward.computation if isinstance(forward, _NormForward) else None


def _original_forward(norm: Any, before: Any) -> Callable[..., Any]:
    """Return the `forward` that `norm` had, the user's or that of its class."""
    if isinstance(before, MethodType):
        return MethodType(before.__func__, norm)  # bound to this norm, which may be a copy
    if before is not None:
        return before  # type: ignore[no-any-return]
    forward = type(norm).forward
    return MethodType(_BatchNorm.forward if forward is nn.SyncBatchNorm.forward else forward, norm)


def leave_uncompiled(norm: Any) -> None:
    """Exclude `norm`, which `compute_by` changed, from compilation: it waits for other ranks."""
    forward = vars(norm)["forward"]
    forward.compute = torch.compiler.disable(forward.compute)  # type: ignore[no-untyped-call]
