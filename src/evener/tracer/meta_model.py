"""Models on the meta device: shapes and dtypes of tensors without memory, and costs of operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from evener.tracer.model_copy import copied_model

META = torch.device("meta")


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of `model` on the meta device."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in (*vars(module).values(), *module._parameters.values(), *module._buffers.values()):
            if isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = nn.Parameter(value_on_meta(tensor).detach(), tensor.requires_grad)
            elif isinstance(tensor, Tensor):
                memo[id(tensor)] = torch.empty_like(tensor, device=META)
    copied = copied_model(model, memo)
    for module in copied.modules():
        if isinstance(module, _BatchNorm) and module.momentum is None:
            module.momentum = 0.0  # None would read the number of batches, which has no value on the meta device
    return copied


def value_on_meta(value: Any) -> Any:
    """Return a meta tensor in place of a tensor, and the meta device in place of a device."""
    if isinstance(value, Tensor):
        return value if value.is_meta else torch.empty_like(value, device=META)
    return META if isinstance(value, torch.device) else value


def storage_of(tensor: Tensor) -> int:
    """Return a number that tensors with the same memory share."""
    return int(tensor.untyped_storage()._cdata)


def attributes(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return names and tensors of all parameters, buffers and other tensors of modules; names may share a tensor."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        named += [(prefix + name, value) for name, value in vars(module).items() if isinstance(value, Tensor)]
    return named


def attribute(model: nn.Module, name: str) -> Any:
    """Return the attribute of `model` with a dotted name."""
    path, _, last = name.rpartition(".")
    return getattr(model.get_submodule(path), last)


class Twins:
    """Maps tensors to twins on the meta device, and records which tensors lost their values."""

    def __init__(self) -> None:
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}
        self._without_numbers: set[int] = set()

    def of(self, value: Any) -> Any:
        """Return the twin of `value` on the meta device."""
        if not isinstance(value, Tensor) or value.is_meta:
            return value_on_meta(value)
        return self._twins.setdefault(id(value), (value, value_on_meta(value)))[1]

    def lose_numbers(self, tensor: Tensor) -> None:
        """Record that `tensor`, and tensors that share its memory, have no values from now on."""
        self._without_numbers.add(storage_of(tensor))

    def has_no_numbers(self, tensor: Tensor) -> bool:
        """Return whether `tensor` has no memory, or no valid values."""
        return tensor.is_meta or storage_of(tensor) in self._without_numbers


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether `func` with these arguments draws random numbers; some only do so in training or dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    arguments = {one.name: one.default_value for one in func._schema.arguments}
    arguments |= dict(zip(arguments, args, strict=False)) | dict(kwargs)
    trains = arguments.get("training", arguments.get("train"))
    return trains is not False and arguments.get("dropout_p") != 0.0


class Spent(NamedTuple):
    """The costs of one operation: forward FLOPs, bytes of each newly kept storage, and whether it is random."""

    flops: int
    kept_sizes: tuple[int, ...]
    is_random: bool


class CostMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measures what runs while it is entered. Keeping the tensors `held`, which exist already, costs nothing."""

    def __init__(self, held: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = {storage_of(tensor): tensor.untyped_storage() for tensor in held}
        self._flops, self._is_random = 0, False
        self._kept: list[int] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` and add its costs."""
        outputs = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self._flops += count(*args, **(kwargs or {}), out_val=outputs)
        self._is_random |= draws(func, args, kwargs or {})
        return outputs

    def run_quietly(self, compute: Callable[[], Any]) -> Any:
        """Return the result of `compute`, and restore the random generator if it draws numbers."""
        before = torch.random.get_rng_state()
        outputs = compute()
        if self._is_random:
            torch.random.set_rng_state(before)
        return outputs

    def keep(self, tensor: Tensor) -> Tensor:
        """Record `tensor`, as a hook for tensors that autograd saves; its storage stays alive, so its id is unique."""
        if storage_of(tensor) not in self._storages:
            self._storages[storage_of(tensor)] = tensor.untyped_storage()
            self._kept.append(tensor.untyped_storage().nbytes())
        return tensor

    def take(self) -> Spent:
        """Return the costs since the last call."""
        spent = Spent(self._flops, tuple(self._kept), self._is_random)
        self._flops, self._kept, self._is_random = 0, [], False
        return spent
