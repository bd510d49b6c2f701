"""What operations cost, counted while they run on tensors without memory: arithmetic, what autograd keeps, chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from evener.tracer.meta_model import storage_of


class Spent(NamedTuple):
    """What one operation took.

    Attributes:
        flops: of its forward pass.
        kept: bytes of every storage that autograd keeps for backward and that no operation before has kept.
        is_random: whether it drew random numbers.
    """

    flops: int
    kept: tuple[int, ...]
    is_random: bool


class CostMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what runs while it is entered; `keep` is a hook for the tensors that autograd saves.

    Args:
        held: tensors that are there anyhow: keeping them costs nothing.
    """

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
        self._is_random |= torch.Tag.nondeterministic_seeded in func.tags
        return outputs

    def run_quietly(self, compute: Callable[[], Any]) -> Any:
        """What `compute` returns; if it draws random numbers, the generator is as it was before."""
        before = torch.random.get_rng_state()
        outputs = compute()
        if self._is_random:
            torch.random.set_rng_state(before)
        return outputs

    def keep(self, tensor: Tensor) -> Tensor:
        """Note that autograd saves `tensor`; its storage is held, so that no other is taken for it."""
        if storage_of(tensor) not in self._storages:
            self._storages[storage_of(tensor)] = tensor.untyped_storage()
            self._kept.append(tensor.untyped_storage().nbytes())
        return tensor

    def take(self) -> Spent:
        """What was spent since the last call."""
        spent = Spent(self._flops, tuple(self._kept), self._is_random)
        self._flops, self._kept, self._is_random = 0, [], False
        return spent
