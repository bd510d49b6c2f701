"""Norms that are computed in another way stay the objects that they are: only their `forward` is set anew.

Class, attributes, hooks, names in a state dict and `type(norm)` are those that PyTorch gave them. So a program that
looks for norms by their class, freezes them, changes their momentum or resets their statistics does what it did before.
A copy of a norm (such as a moving average) is computed in the same way; a norm that is loaded from a pickle is plain.
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
    """How norms are computed."""

    def compute(self, norm: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `norm` returns, whose own class computes it by `forward`."""
        ...


def norms_with_statistics(model: nn.Module) -> dict[str, Any]:
    """By name, norms in `model` with statistics of a batch: every BatchNorm, and InstanceNorms with running ones."""
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, _NormBase))
    return {name: norm for name, norm in found if isinstance(norm, _BatchNorm) or norm.running_mean is not None}


def compute_by(norm: Any, computation: NormComputation) -> None:
    """Let `norm` be computed by `computation` from now on, in the place of what computed it before.

    Raises:
        InvalidInput: `norm` is of a class that exchanges statistics itself.
    """
    if isinstance(norm, nn.SyncBatchNorm) and type(norm).forward not in (nn.SyncBatchNorm.forward, _BatchNorm.forward):
        raise InvalidInput(
            f"{type(norm).__name__} is a SyncBatchNorm with a forward of its own, which would exchange statistics "
            "twice: make it a subclass of BatchNorm1d, BatchNorm2d or BatchNorm3d"
        )
    before = vars(norm).get("forward")
    if isinstance(before, _NormForward):
        before = before.before
    vars(norm)["forward"] = _NormForward(norm, computation, before)


class _NormForward:
    """The `forward` of one norm, which it does not keep alive: a model is freed as soon as nobody refers to it.

    A deep copy belongs to the copy of the norm. What is loaded from a pickle is the `forward` of the norm's class.
    """

    def __init__(self, norm: Any, computation: NormComputation, before: Any) -> None:
        self._norm = weakref.ref(norm)
        self.computation, self.before = computation, before
        self.compute = computation.compute

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        norm = self._norm()
        return self.compute(norm, _own_forward(norm, self.before), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _NormForward:
        copy = _NormForward(memo.get(id(self._norm()), self._norm()), self.computation, self.before)
        copy.compute = self.compute
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._norm(), "forward")


def computation_of(module: Any) -> Any:
    """What computes `module` since `compute_by`; None if it is computed as its class says."""
    forward = getattr(module, "__dict__", {}).get("forward")
    return forward.computation if isinstance(forward, _NormForward) else None


def _own_forward(norm: Any, before: Any) -> Callable[..., Any]:
    """The `forward` that `norm` had, of the user's own or of its class."""
    if isinstance(before, MethodType):
        return MethodType(before.__func__, norm)  # a copy of a norm computes with its own tensors
    if before is not None:
        return before  # type: ignore[no-any-return]
    known = type(norm).forward
    return MethodType(_BatchNorm.forward if known is nn.SyncBatchNorm.forward else known, norm)


def leave_uncompiled(norm: Any) -> None:
    """Let compilers leave out `norm`, which `compute_by` has changed: it waits for other ranks."""
    forward = vars(norm)["forward"]
    forward.compute = torch.compiler.disable(forward.compute)  # type: ignore[no-untyped-call]
