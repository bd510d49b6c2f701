"""A copy of a model computes with its own tensors, whatever its functions know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from evener.tracer.meta_model import on_meta
from evener.tracer.model_copy import copied_model, rebound


def _odd() -> Any:
    """A model with a replaced `forward`, hooks of every kind of which one counts, and a function that knows itself."""
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    first, second, last = model
    plain, calls = first.forward, []
    first.forward = lambda x: plain(x) + second.weight.sum()

    def halve(number: int, x: Tensor) -> Tensor:
        return halve(number - 1, x * last.bias.mean()) if number else x

    second.register_forward_hook(lambda module, args, output: halve(2, output))
    second.register_forward_pre_hook(lambda module, args: calls.append(1))
    last.bend = torch.tanh
    model.calls = calls
    return model


def test_copied_functions_use_the_copy_and_share_unrelated_objects() -> None:
    model, x = _odd(), torch.randn(2, 3)
    twin: Any = copied_model(model, {})
    expected = model(x)
    assert torch.equal(twin(x), expected)
    for parameter in model.parameters():
        parameter.data.zero_()
    torch.testing.assert_close(twin(x), expected)
    twin(x).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(model.calls) == 4  # one list, whoever is called
    assert twin[2].bend is torch.tanh


def test_meta_model_runs_through_replaced_functions() -> None:
    assert on_meta(_odd())(torch.zeros(2, 3, device="meta")).is_meta


def test_function_unrelated_to_the_model_is_not_copied() -> None:
    number = 2

    def double(x: int) -> int:
        return x * number

    functions: list[Callable[..., Any]] = [double, len]
    assert [rebound(one, {}) for one in functions] == functions
