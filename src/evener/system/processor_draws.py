"""Random numbers for accelerators that the processor draws: devices of different kinds draw different ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from evener.records.errors import InvalidInput
from evener.system.accelerators import CPU, is_accelerator

_FILLING = frozenset(
    ("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "geometric_", "log_normal_", "cauchy_")
)
"""Operators that do not read the tensor that they fill."""
Draw: TypeAlias = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
"""Calls an operator of PyTorch with its arguments."""


class ProcessorDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which the processor's generator draws the random numbers of operations on accelerators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`. Raises InvalidInput: it draws random numbers, and only an accelerator has it."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or device_of(args, kwargs) is None:
            return func(*args, **kwargs)
        try:
            return draw_on_processor(_call, func, args, kwargs)
        except NotImplementedError as error:
            raise InvalidInput(
                f"{func.overloadpacket.__name__} draws random numbers on an accelerator, and the nodes have devices of "
                "different kinds, which draw different numbers: use devices of one kind, or no dropout there"
            ) from error


def device_of(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device | None:
    """Return the accelerator on which an operator with these arguments draws; None for the processor."""
    for value in tree_leaves((args, kwargs)):
        device = value.device if isinstance(value, Tensor) else value
        if isinstance(device, torch.device) and is_accelerator(device):
            return device
    return None


def draw_on_processor(draw: Draw, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what an operator gives on an accelerator, with random numbers of the processor.

    Args:
        draw: calls the operator on the processor.
        func: an operator that draws random numbers.
        args: of `func`.
        kwargs: of `func`.

    Raises:
        NotImplementedError: the processor does not have the operator.
    """
    device = device_of(args, kwargs)
    if func is torch.ops.aten.native_dropout.default:
        return _dropout(draw, *args)
    name = func.overloadpacket.__name__
    ignores_values = name in _FILLING or name.endswith("_like")

    def here(value: Any) -> Any:
        if isinstance(value, Tensor):
            is_empty = ignores_values and value is args[0]
            return torch.empty_like(value, device=CPU) if is_empty else value.to(CPU)
        return CPU if isinstance(value, torch.device) else value

    copies, named = [tree_map(here, one) for one in args], tree_map(here, kwargs)
    made = draw(func, copies, named)
    written = {one.name: one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments}
    for is_written, original, copied in zip(written.values(), args, copies, strict=False):
        if is_written:
            original.copy_(copied)
    for key in filter(written.get, kwargs):
        kwargs[key].copy_(named[key])
    if name.endswith("_"):
        return args[0]
    return kwargs["out"] if "out" in kwargs else tree_map(lambda value: _on(device, value), made)


def _on(device: torch.device | None, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _dropout(draw: Draw, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Return what dropout gives and its mask, drawn as on the processor, whose dropout consists of other operators."""
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    noise = torch.empty_like(x, device=CPU)
    draw(torch.ops.aten.bernoulli_.float, (noise, 1 - p), {})
    noise = noise.to(x.device)
    return x * (noise / (1 - p)), noise.bool()


def _call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)
