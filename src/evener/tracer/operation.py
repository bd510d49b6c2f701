"""One running operation: its arguments, the tensors that it changes, and effects that a graph cannot hold."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import EllipsisType, FrameType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import is_tensor_method_or_property

from evener.records.errors import file_line, is_users
from evener.tracer.ir import record
from evener.tracer.nested import tensors_in

PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))
"""Types other than tensors that arguments and results may have."""
SETTINGS = (torch.layout, torch.memory_format, EllipsisType)
"""Types that arguments may also have."""
_UNKNOWN = "neither tensor, tuple, list nor dict"
_READS = {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__bool__", "__int__", "__float__", "__index__"}
"""Operations that pass a tensor's values to Python."""
_AUTOGRAD_FUNCTIONS: tuple[Any, ...] = (
    torch.autograd.grad,
    torch.autograd.backward,
    Tensor.backward,
    Tensor.register_post_accumulate_grad_hook,
)
"""Functions that query, or change, how tensors were computed."""


class NotAnOperation(Exception):
    """Raised for code that is not an operation.

    It is not a TypeError, because Python's operators would handle that themselves.
    """


@dataclass
class RunningOperation:
    """The operation that is running, with its arguments.

    `versions` holds for each tensor argument: the model's tensor, the operation's tensor, and that one's version.
    `held` holds the tensors of the called module and their versions. The operation `moves` if the module contains a
    BatchNorm that moves its statistics.
    """

    args: Any
    kwargs: Any
    line: str
    path: str
    versions: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)
    held: list[tuple[Tensor, int]] = field(default_factory=list)
    training: tuple[bool, ...] = ()
    moves: bool = False

    def give(self, replacements: Any) -> Any:
        """Record that the operation runs with the tensors in `replacements`, in place of its own; return these."""
        pairs = zip(tensors_in((self.args, self.kwargs)), tensors_in(replacements), strict=True)
        self.versions = [(original, tensor, tensor._version) for original, tensor in pairs]
        return replacements

    def is_call_of(self, module: nn.Module) -> None:
        """Record that the operation is a call of `module`."""
        norms = [one for one in module.modules() if isinstance(one, _BatchNorm)]
        self.moves = any(norm.training and norm.track_running_stats for norm in norms)
        self.held = [(tensor, tensor._version) for tensor in (*module.buffers(), *module.parameters())]
        self.training = tuple(one.training for one in module.modules())

    @property
    def changed(self) -> list[tuple[Tensor, Tensor]]:
        """Tensors that it changed in place: (the model's tensor, the operation's tensor)."""
        return [(original, tensor) for original, tensor, version in self.versions if tensor._version != version]

    @property
    def changes_module(self) -> bool:
        """Whether it changed tensors of its module."""
        return self.moves or any(tensor._version != version for tensor, version in self.held)


def called(func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, Any, tuple[Any, ...]]:
    """Return (kind, target, arguments) of the call of `func`, as in torch.fx."""
    if func.__name__ == "__get__":
        return "call_function", getattr, (args[0], func.__self__.__name__)  # type: ignore[attr-defined]
    if is_tensor_method_or_property(func):
        return "call_method", func.__name__, args
    return "call_function", func, args


def moved_by(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return running statistics that a functional norm changes, which its versions on the meta device do not show."""
    if func not in (F.batch_norm, F.instance_norm):
        return []
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    trains = bound.arguments.get("training", bound.arguments.get("use_input_stats"))
    named = [bound.arguments[name] for name in ("running_mean", "running_var")]
    return [tensor for tensor in named if trains and tensor is not None]


def refuse_hidden(func: Callable[..., Any]) -> None:
    """Raise NotAnOperation for a function with an effect that a graph cannot hold."""
    if func in _AUTOGRAD_FUNCTIONS:
        raise NotAnOperation(f"{func.__qualname__} queries or changes how tensors are computed")
    if func.__name__ == "__set__":
        name = func.__self__.__name__  # type: ignore[attr-defined]
        raise NotAnOperation(f"the model sets .{name} of a tensor")


def reads_numbers(func: Callable[..., Any]) -> bool:
    """Return whether `func` passes values of a tensor to Python."""
    return func.__name__ in _READS


def is_drawn(node: fx.Node) -> bool:
    """Return whether the value of `node` depends on random numbers."""
    waiting, seen = [node], {node}
    while waiting:
        one = waiting.pop()
        if record(one).is_random:
            return True
        new = set(one.all_input_nodes) - seen
        seen |= new
        waiting += new
    return False


def is_computed_twice() -> bool:
    """Return whether backward will recompute the current operation (`torch.utils.checkpoint`)."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # there since PyTorch 2.8
    return hooks is not None and str(hooks[0].__module__) == "torch.utils.checkpoint"


def users_line(outermost: FrameType | None) -> str:
    """Return file and line of the innermost user's code inside of `outermost`; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not outermost:
        if is_users(frame.f_code.co_filename):
            return file_line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def setting(value: Any) -> Any:
    """Return `value` as a non-tensor argument. Raises NotAnOperation if a graph cannot hold it."""
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, (*PLAIN, *SETTINGS)):
        raise NotAnOperation(f"an operation takes a {type(value).__name__}, which is {_UNKNOWN}")
    return value


def refuse_unknown(value: Any) -> None:
    """Raise NotAnOperation for a result that is neither a tensor nor plain."""
    if not isinstance(value, PLAIN):
        raise NotAnOperation(f"returns a {type(value).__name__}, which is {_UNKNOWN}")
