"""PyTorch's modules and functions for the planner: tables from their type to kind, windows and weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from types import FunctionType
from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from evener.oracle.division.layout import Shape
from evener.oracle.division.network import Adaptive, Kind, Linear, Nearest, Role, Sliding, Spreading, Weight, WindowRule
from evener.records.errors import InvalidInput
from evener.tracer.hooks import are_traced, has_backward_hooks

_DEFAULT_METHODS = ("__init__", "extra_repr", "reset_parameters")


class BatchNorm(_BatchNorm):
    """A BatchNorm for any number of dims: a SyncBatchNorm without a group.

    It is no SyncBatchNorm, which DistributedDataParallel refuses on processors.
    """

    def _check_input_dim(self, x: Tensor) -> None:
        """Take inputs of any number of dims."""


def synchronised_norms(model: nn.Module) -> list[nn.SyncBatchNorm]:
    """Return the SyncBatchNorms of `model`.

    Raises:
        InvalidInput: one is of a class of the user's own, whose computation is unknown.
    """
    found = []
    for name, module in model.named_modules():
        if type(module) is nn.SyncBatchNorm:
            found.append(module)
        elif isinstance(module, nn.SyncBatchNorm):
            raise InvalidInput(
                f"layer {name} ({type(module).__name__}) is of a class derived from nn.SyncBatchNorm, which exchanges "
                "statistics by itself: derive it from nn.BatchNorm2d, whose statistics Evener takes of all samples"
            )
    return found


def without_synchronised(model: nn.Module) -> nn.Module:
    """Replace the SyncBatchNorms of `model` with plain ones, which division synchronises on any device.

    Raises:
        InvalidInput: see `synchronised_norms`.
    """
    for norm in synchronised_norms(model):
        make_plain(norm)
    return model


def make_plain(norm: nn.Module) -> None:
    """Make a SyncBatchNorm a plain one."""
    norm.__class__ = BatchNorm


class Description(TypedDict, total=False):
    """Fields of an Operation that depend on its type. The kind is `other` if it is missing."""

    kind: Kind
    windows: tuple[WindowRule, ...]
    groups: int
    filter_dim: int
    weights: tuple[Weight, ...]


def of_module(module: nn.Module, inputs: Sequence[Shape], output: Shape) -> Description:
    """Describe `module` for inputs and output of these shapes."""
    base = base_of(module)
    description = _MODULES[base](module, inputs[0], output) if len(inputs) == 1 and is_plain(module) else {}
    if not description:
        return undivided(module)
    return {"kind": "other", **description, "weights": _weights(module, _ROLES.get(base, {}))}


def is_one_operation(module: nn.Module) -> bool:
    """Return whether `module` is a module of PyTorch or a norm with statistics, but not a container."""
    is_of_torch = base_of(module).__module__.startswith("torch.nn") and not isinstance(module, nn.Sequential)
    return is_of_torch or isinstance(module, _NormBase)


def undivided(module: nn.Module) -> Description:
    """Describe `module` as computed whole, with its backward pass if it has hooks or exchanges statistics."""
    is_whole = any(has_backward_hooks(one) or isinstance(one, _NormBase) for one in module.modules())
    return {"kind": "whole" if is_whole else "other", "weights": _weights(module, {})}


def base_of(module: nn.Module) -> type[nn.Module]:
    """Return the class that defines what `module` does; subclasses that only change defaults are skipped."""
    return next(base for base in type(module).__mro__ if _defines_methods(base))


def _defines_methods(cls: type) -> bool:
    if cls.__module__.startswith("torch."):
        return True
    methods = (FunctionType, property, classmethod, staticmethod)
    return any(isinstance(value, methods) and name not in _DEFAULT_METHODS for name, value in vars(cls).items())


def is_plain(module: nn.Module) -> bool:
    """Return whether `module` is in the table, with the table's weights and nothing added to its passes."""
    base = base_of(module)
    names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    is_known = base in _MODULES and names <= {*_ROLES.get(base, {}), "num_batches_tracked"}
    return is_known and are_traced(module) and "forward" not in vars(module) and not has_backward_hooks(module)


def _weights(module: nn.Module, roles: dict[str, Role]) -> tuple[Weight, ...]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return tuple(
        Weight(
            name=name,
            shape=tuple(tensor.shape),
            role=roles.get(name, "free"),
            trainable=isinstance(tensor, nn.Parameter) and tensor.requires_grad,
        )
        for name, tensor in tensors
    )


def _convolution(module: Any, _input: Shape, output: Shape) -> Description:
    description: Description = {"kind": "convolution", "groups": module.groups}
    if module.padding_mode == "zeros":
        description["windows"] = tuple(
            Sliding(k, s, _before(module.padding, i, k, d), d)
            for i, (k, s, d) in enumerate(zip(module.kernel_size, module.stride, module.dilation, strict=True))
        )
    return description if _is_batch(module, output) else {}


def _is_batch(module: nn.Module, shape: Shape) -> bool:
    """Return whether `shape` is that of several images or volumes, (N, C, ...), rather than of a single one."""
    return len(shape) == (5 if isinstance(module, _VOLUME_MODULES) else 4)


def _before(padding: str | tuple[int, ...], i: int, kernel: int, dilation: int) -> int:
    if isinstance(padding, str):
        return dilation * (kernel - 1) // 2 if padding == "same" else 0
    return padding[i]


def _transposed(module: Any, _input: Shape, output: Shape) -> Description:
    settings = zip(module.kernel_size, module.stride, module.padding, module.dilation, strict=True)
    windows = tuple(Spreading(*one) for one in settings)
    description: Description = {"kind": "convolution", "groups": module.groups, "filter_dim": 1, "windows": windows}
    return description if _is_batch(module, output) else {}


def _pool(module: Any, _input: Shape, output: Shape) -> Description:
    if not _is_batch(module, output) or getattr(module, "return_indices", False):
        return {}
    dilation = getattr(module, "dilation", 1)
    settings = (module.kernel_size, module.stride, module.padding, dilation)
    sides = zip(*(_each(value, len(output) - 2) for value in settings), strict=True)
    return {"kind": "pool", "windows": tuple(Sliding(*side) for side in sides)}


def _adaptive(module: Any, input_shape: Shape, output: Shape) -> Description:
    if not _is_batch(module, output) or getattr(module, "return_indices", False):
        return {}
    if set(output[2:]) == {1} and isinstance(module, nn.AdaptiveAvgPool2d | nn.AdaptiveAvgPool3d):
        return {"kind": "average"}
    return {"kind": "pool", "windows": tuple(Adaptive(*side) for side in zip(input_shape[2:], output[2:], strict=True))}


def _resize(module: Any, input_shape: Shape, output: Shape) -> Description:
    if len(output) not in (4, 5):
        return {}
    factors = _each(None if module.recompute_scale_factor else module.scale_factor, len(output) - 2)
    sides = list(zip(input_shape[2:], output[2:], factors, strict=True))
    windows: tuple[WindowRule, ...] = ()
    if module.mode == "nearest":
        windows = tuple(Nearest(n, 1 / f if f else n / m) for n, m, f in sides)
    elif module.mode in _LINEAR and module.align_corners:
        windows = tuple(Linear(n, (n - 1) / (m - 1) if m > 1 else 0.0, 0.0) for n, m, _ in sides)
    elif module.mode in _LINEAR:
        windows = tuple(Linear(n, 1 / f if f else n / m, 0.5) for n, m, f in sides)
    return {"kind": "resize", "windows": windows}


def _instance_norm(module: Any, input_shape: Shape, _output: Shape) -> Description:
    is_divided = not module.track_running_stats and _is_batch(module, input_shape)
    return {"kind": "group_norm", "groups": input_shape[1]} if is_divided else {}


def _each(value: Any, sides: int) -> tuple[Any, ...]:
    """Return `value` for every side, unless it already has one value per side."""
    return tuple(value) if isinstance(value, Sequence) else (value,) * sides


def _constant_kind(kind: Kind) -> Callable[[Any, Shape, Shape], Description]:
    return lambda _module, _input, _output: {"kind": kind}


_pointwise = _constant_kind("pointwise")
_LINEAR = ("bilinear", "trilinear")
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, BatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm2d, nn.InstanceNorm3d)
_VOLUME_MODULES = (
    *(nn.Conv3d, nn.ConvTranspose3d, nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d),
    nn.InstanceNorm3d,
)
_MODULES: dict[type[nn.Module], Callable[[Any, Shape, Shape], Description]] = {
    **dict.fromkeys((nn.Conv2d, nn.Conv3d), _convolution),
    **dict.fromkeys((nn.ConvTranspose2d, nn.ConvTranspose3d), _transposed),
    nn.Linear: lambda _module, _input, output: {"kind": "linear"} if len(output) == 2 else {},
    **dict.fromkeys((nn.MaxPool2d, nn.AvgPool2d, nn.MaxPool3d, nn.AvgPool3d), _pool),
    **dict.fromkeys((nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d), _adaptive),
    **dict.fromkeys((nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d), _adaptive),
    nn.Upsample: _resize,
    **dict.fromkeys(_BATCH_NORMS, _constant_kind("batch_norm")),
    nn.GroupNorm: lambda module, _input, _output: {"kind": "group_norm", "groups": module.num_groups},
    **dict.fromkeys(_INSTANCE_NORMS, _instance_norm),
    **dict.fromkeys((nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish), _pointwise),
    **dict.fromkeys((nn.Sigmoid, nn.Hardsigmoid, nn.LogSigmoid, nn.Tanh, nn.Hardtanh, nn.Hardswish), _pointwise),
    **dict.fromkeys((nn.Softplus, nn.Softsign, nn.Threshold, nn.Dropout, nn.Identity), _pointwise),
}  # fmt: skip
_KERNEL: dict[str, Role] = {"weight": "kernel", "bias": "vector"}
_VECTORS: dict[str, Role] = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), "vector")
_ROLES: dict[type[nn.Module], dict[str, Role]] = {
    **dict.fromkeys((nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear), _KERNEL),
    **dict.fromkeys((*_BATCH_NORMS, nn.GroupNorm, *_INSTANCE_NORMS), _VECTORS),
}

AS_MODULES: dict[Callable[..., Any], type[nn.Module]] = {
    F.max_pool2d: nn.MaxPool2d,
    F.avg_pool2d: nn.AvgPool2d,
    F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    F.adaptive_max_pool2d: nn.AdaptiveMaxPool2d,
    F.max_pool3d: nn.MaxPool3d,
    F.avg_pool3d: nn.AvgPool3d,
    F.adaptive_avg_pool3d: nn.AdaptiveAvgPool3d,
    F.adaptive_max_pool3d: nn.AdaptiveMaxPool3d,
    F.interpolate: nn.Upsample,
    F.dropout: nn.Dropout,
}
"""Functions that are computed as the module with the same meaning."""

_ALIKE = (
    *("add", "sub", "mul", "div", "maximum", "minimum", "pow", "neg", "abs", "exp", "log", "sqrt", "rsqrt", "square"),
    *("relu", "sigmoid", "tanh", "clamp", "clamp_min", "clamp_max"),
)
_NEURAL = ("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "hardsigmoid", "hardswish")
_POINTWISE: frozenset[Any] = frozenset(
    (
        *_ALIKE,
        *(getattr(torch, name) for name in _ALIKE),
        *(getattr(F, name) for name in (*_NEURAL, "hardtanh", "logsigmoid", "softplus", "softsign")),
        *("truediv", "clone", "contiguous", "float", "double", "half", "bfloat16"),
    )
)
"""Functions, and names of methods, that compute element by element."""
RESHAPES: frozenset[Any] = frozenset(
    ("flatten", "view", "reshape", "squeeze", torch.flatten, torch.reshape, torch.squeeze)
)
MEANS: frozenset[Any] = frozenset(("mean", torch.mean))
NORMS: frozenset[Any] = frozenset((F.batch_norm, F.instance_norm))
CUTS: frozenset[Any] = frozenset(("chunk", "split", torch.chunk, torch.split))
CONCATENATIONS: frozenset[Any] = frozenset((torch.cat, torch.concat))


def not_in_place(target: Any) -> Any:
    """Return the function or method name that does the same out of place; `target` if there is none."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name.startswith("__i") and name.endswith("__"):
        return f"__{name[3:]}"
    if name.endswith("_") and not name.endswith("__"):
        if isinstance(target, str):
            return name[:-1] if callable(getattr(Tensor, name[:-1], None)) else target
        return next((getattr(room, name[:-1]) for room in (torch, F) if hasattr(room, name[:-1])), target)
    return target


def is_pointwise(target: Any) -> bool:
    """Return whether a function, or a method of this name, computes element by element."""
    if isinstance(target, str) and target.startswith("__"):
        name = target.strip("_")
        return name in _POINTWISE or name.removeprefix("r") in _POINTWISE
    return target in _POINTWISE


def flattens(inputs: Sequence[Shape], output: Shape) -> bool:
    """Return whether an output (N, C H W) has the numbers of its only input, an image or volume, in their order."""
    if len(inputs) != 1 or len(inputs[0]) not in (4, 5) or len(output) != 2:
        return False
    return output == (inputs[0][0], prod(inputs[0][1:]))


def averages(inputs: Sequence[Shape], node: fx.Node) -> bool:
    """Return whether a mean is that over all pixels of images or volumes."""
    if len(inputs) != 1 or len(inputs[0]) not in (4, 5) or "dtype" in node.kwargs:
        return False
    dims: Any = node.kwargs.get("dim", (*node.args, None, None)[1])
    listed = [d % len(inputs[0]) for d in dims] if isinstance(dims, Sequence) else []
    return sorted(listed) == list(range(2, len(inputs[0])))
