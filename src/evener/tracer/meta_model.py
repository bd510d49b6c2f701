"""A model without memory: shapes and dtypes of all its tensors on the meta device, none of their numbers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

META = torch.device("meta")


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of `model` whose tensors have no memory."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in (*vars(module).values(), *module._parameters.values(), *module._buffers.values()):
            if isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = nn.Parameter(value_on_meta(tensor).detach(), tensor.requires_grad)
            elif isinstance(tensor, Tensor):
                memo[id(tensor)] = torch.empty_like(tensor, device=META)
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        if isinstance(module, _BatchNorm) and module.momentum is None:
            module.momentum = 0.0  # None would read the number of batches, which has no value here
    return copied


def value_on_meta(value: Any) -> Any:
    """A tensor without memory in place of `value`, if that is a tensor; the device without memory, if it is one."""
    if isinstance(value, Tensor):
        return value if value.is_meta else torch.empty_like(value, device=META)
    return META if isinstance(value, torch.device) else value


def storage_of(tensor: Tensor) -> int:
    """What tensors that share memory have in common."""
    return int(tensor.untyped_storage()._cdata)


def attributes(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Names and tensors of all parameters, buffers and other tensors that modules hold; a tensor may have several."""
    found = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        found += [(prefix + name, value) for name, value in vars(module).items() if isinstance(value, Tensor)]
    return found


def attribute(model: nn.Module, name: str) -> Any:
    """What `model` holds under a dotted name."""
    path, _, last = name.rpartition(".")
    return getattr(model.get_submodule(path), last)
