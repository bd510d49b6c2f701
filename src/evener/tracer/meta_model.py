"""A model without memory: shapes and dtypes of its tensors on the meta device, and what operations on them cost."""

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
    """A copy of `model` whose tensors have no memory."""
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


class Twins:
    """Tensors without memory that stand for others, always the same for each; and which others lost their numbers."""

    def __init__(self) -> None:
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}
        self._without_numbers: set[int] = set()

    def of(self, value: Any) -> Any:
        """What stands for `value` where there are no numbers."""
        if not isinstance(value, Tensor) or value.is_meta:
            return value_on_meta(value)
        return self._twins.setdefault(id(value), (value, value_on_meta(value)))[1]

    def lose_numbers(self, tensor: Tensor) -> None:
        """From now on `tensor`, and what shares its memory, has no numbers."""
        self._without_numbers.add(storage_of(tensor))

    def has_no_numbers(self, tensor: Tensor) -> bool:
        """Whether `tensor` has no memory, or none that still counts."""
        return tensor.is_meta or storage_of(tensor) in self._without_numbers


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether `func` of these arguments draws random numbers; some only do in training, or where any are dropped."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = {one.name: one.default_value for one in func._schema.arguments}
    given |= dict(zip(given, args, strict=False)) | dict(kwargs)
    trains = given.get("training", given.get("train"))
    return trains is not False and given.get("dropout_p") != 0.0


class Spent(NamedTuple):
    """What one operation took: FLOPs of its forward pass, bytes of every storage that autograd keeps anew, chance."""

    flops: int
    kept: tuple[int, ...]
    is_random: bool


class CostMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what runs while it is entered; keeping the tensors `held`, which are there anyhow, costs nothing."""

    def __init__(self, held: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = {storage_of(tensor): tensor.untyped_storage() for tensor in held}
        self._flops, self._is_random = 0, False
        self._kept: list[int] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` and count it."""
        outputs = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self._flops += count(*args, **(kwargs or {}), out_val=outputs)
        self._is_random |= draws(func, args, kwargs or {})
        return outputs

    def run_quietly(self, compute: Callable[[], Any]) -> Any:
        """What `compute` returns; if it draws random numbers, the generator is as it was before."""
        before = torch.random.get_rng_state()
        outputs = compute()
        if self._is_random:
            torch.random.set_rng_state(before)
        return outputs

    def keep(self, tensor: Tensor) -> Tensor:
        """A hook for what autograd saves: note `tensor`; its storage is held, so that no other is taken for it."""
        if storage_of(tensor) not in self._storages:
            self._storages[storage_of(tensor)] = tensor.untyped_storage()
            self._kept.append(tensor.untyped_storage().nbytes())
        return tensor

    def take(self) -> Spent:
        """What was spent since the last call."""
        spent = Spent(self._flops, tuple(self._kept), self._is_random)
        self._flops, self._kept, self._is_random = 0, [], False
        return spent
