"""Models and batches without memory: their copies on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

BATCH = 61
"""Samples of the traced batch: a prime, so that the sample dim of any tensor can be told from its other dims."""


class _CopyToMeta(TorchFunctionMode):
    """While it is active, deep copies of tensors have their shape and dtype but no memory."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace the two ways in which a deep copy gets memory: plain tensors, and the clone inside of parameters."""
        if func is Tensor.clone:
            return torch.empty_like(args[0], device="meta")
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = torch.empty_like(tensor, device="meta")
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of `model` that has shapes and dtypes but no memory."""
    with torch.no_grad(), _CopyToMeta():
        return copy.deepcopy(model)


def batch_on_meta(tensor: Tensor) -> Tensor:
    """A tensor of `BATCH` samples shaped like those of `tensor`, without memory."""
    shape = (BATCH, *tensor.shape[1:]) if tensor.dim() else ()
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def call(model: nn.Module, batch: Any) -> None:
    """Run `model` on `batch`: a tensor, or positional or named arguments."""
    if isinstance(batch, dict):
        model(**batch)
    elif isinstance(batch, (tuple, list)):
        model(*batch)
    else:
        model(batch)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `function` of every tensor in it; named tuples become plain ones."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return [map_tensors(item, function) for item in value]
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    return value


def shape_of_sample(output: Tensor | None) -> tuple[int, ...]:
    """The shape of an output without its sample dim; windows and tokens that were folded into it are kept."""
    shape = list(output.shape) if output is not None else []
    if BATCH in shape:
        shape.remove(BATCH)
    elif shape and shape[0] % BATCH == 0:
        shape[0] //= BATCH
    return tuple(shape)
