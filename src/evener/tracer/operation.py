"""One operation while it runs: what it was called with, what it changes, and what of it a graph cannot hold."""

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
"""What may stand in arguments and results beside tensors."""
SETTINGS = (torch.layout, torch.memory_format, EllipsisType)
"""What may stand in arguments, too."""
_UNKNOWN = "neither tensor, tuple, list nor dict"
_READS = {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__bool__", "__int__", "__float__", "__index__"}
"""Operations that make a tensor's numbers known to Python."""
_OF_AUTOGRAD: tuple[Any, ...] = (
    torch.autograd.grad,
    torch.autograd.backward,
    Tensor.backward,
    Tensor.register_post_accumulate_grad_hook,
)
"""Functions that ask, or change, how tensors were computed."""


class NotFollowed(Exception):
    """Something happened that is not an operation. (A TypeError would be taken by Python's operators for their own.)"""


@dataclass
class RunningOperation:
    """One that is under way, with what it was called with.

    `versions` are the tensors given: as the model knows them and as the operation does, and how often that was changed;
    `held` are those of the module that is called, with its modes; it `moves` if there is a
    BatchNorm in it whose statistics do.
    """

    args: Any
    kwargs: Any
    line: str
    path: str
    versions: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)
    held: list[tuple[Tensor, int]] = field(default_factory=list)
    training: tuple[bool, ...] = ()
    moves: bool = False

    def give(self, given: Any) -> Any:
        """The operation runs with the tensors in `given`, which stand for its own."""
        pairs = zip(tensors_in((self.args, self.kwargs)), tensors_in(given), strict=True)
        self.versions = [(original, tensor, tensor._version) for original, tensor in pairs]
        return given

    def is_call_of(self, module: nn.Module) -> None:
        """The operation is `module`."""
        norms = [one for one in module.modules() if isinstance(one, _BatchNorm)]
        self.moves = any(norm.training and norm.track_running_stats for norm in norms)
        self.held = [(tensor, tensor._version) for tensor in (*module.buffers(), *module.parameters())]
        self.training = tuple(one.training for one in module.modules())

    @property
    def changed(self) -> list[tuple[Tensor, Tensor]]:
        """Those that it changed in place: (as the model knows it, as it was given)."""
        return [(original, tensor) for original, tensor, version in self.versions if tensor._version != version]

    @property
    def changes_module(self) -> bool:
        """Whether it changed what its module holds."""
        return self.moves or any(tensor._version != version for tensor, version in self.held)


def called(func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, Any, tuple[Any, ...]]:
    """(kind, target, arguments) of the call of `func`, as torch.fx writes them."""
    if func.__name__ == "__get__":
        return "call_function", getattr, (args[0], func.__self__.__name__)  # type: ignore[attr-defined]
    if is_tensor_method_or_property(func):
        return "call_method", func.__name__, args
    return "call_function", func, args


def moved_by(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Running statistics that a functional norm changes, which those on the meta device do not show."""
    if func not in (F.batch_norm, F.instance_norm):
        return []
    given = inspect.signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    trains = given.arguments.get("training", given.arguments.get("use_input_stats"))
    named = [given.arguments[name] for name in ("running_mean", "running_var")]
    return [tensor for tensor in named if trains and tensor is not None]


def refuse_hidden(func: Callable[..., Any]) -> None:
    """Raise NotFollowed for a function whose doing is no value that a graph could hold."""
    if func in _OF_AUTOGRAD:
        raise NotFollowed(f"{func.__qualname__}: how tensors are computed is asked or changed")
    if func.__name__ == "__set__":
        name = func.__self__.__name__  # type: ignore[attr-defined]
        raise NotFollowed(f".{name} of a tensor is set")


def reads_numbers(func: Callable[..., Any]) -> bool:
    """Whether Python knows numbers of a tensor after `func`."""
    return func.__name__ in _READS


def is_drawn(node: fx.Node) -> bool:
    """Whether the value of `node` depends on random numbers."""
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
    """Whether backward will compute again what is computed now (`torch.utils.checkpoint`)."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # there since PyTorch 2.8
    return hooks is not None and str(hooks[0].__module__) == "torch.utils.checkpoint"


def users_line(outermost: FrameType | None) -> str:
    """File and line of the user's code that runs inside of `outermost`, or at all; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not outermost:
        if is_users(frame.f_code.co_filename):
            return file_line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def setting(value: Any) -> Any:
    """`value` as an argument that is no tensor. Raises NotFollowed if a graph cannot hold it."""
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, (*PLAIN, *SETTINGS)):
        raise NotFollowed(f"an operation takes a {type(value).__name__}, which is {_UNKNOWN}")
    return value


def refuse_unknown(value: Any) -> None:
    """Raise NotFollowed for what an operation or the model returned, and that is neither tensor nor plain."""
    if not isinstance(value, PLAIN):
        raise NotFollowed(f"returns a {type(value).__name__}, which is {_UNKNOWN}")
