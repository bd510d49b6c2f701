"""Gradients of inputs and of weights in two passes are those of one pass, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evener.parallel.pipeline.split_backward import backward_of_inputs


class Of(nn.Module):
    """A module that computes a function of itself and its inputs."""

    def __init__(self, compute: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self._compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self._compute(self, *inputs)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def linear() -> nn.Linear:
    return nn.Linear(8, 8)


SPLIT: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(linear(), nn.ReLU(), linear(), nn.LayerNorm(8)),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2, padding=1), nn.BatchNorm2d(4), nn.SiLU(), nn.Flatten()
    ),
    "attention": lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.TransformerEncoderLayer(4, 2, 8, 0.0)),
    "residual": lambda: Of(lambda own, x: x + own.b(torch.relu(own.a(x))), a=linear(), b=linear()),
    "parametrised": lambda: nn.utils.parametrizations.weight_norm(linear()),
    "scaled weight": lambda: Of(lambda own, x: own.a(x) * own.w.exp().sum(), a=linear(), w=weight(8)),
    "frozen layer": lambda: nn.Sequential(linear(), frozen(linear()), linear()),
    "no weights": lambda: nn.Sequential(nn.ReLU(), nn.Softmax(1)),
    "in place": lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear()),
    "two inputs": lambda: Of(lambda own, x, y: own.a(x) * torch.sigmoid(own.b(y)), a=linear(), b=linear()),
    "unused input": lambda: Of(lambda own, x, _: own.a(x), a=linear()),
    "two outputs": lambda: Of(lambda own, x: (own.a(x), own.b(x)), a=linear(), b=linear()),
    "recomputed": lambda: Of(lambda own, x: own.b(checkpoint(own.a, x, use_reentrant=False)), a=linear(), b=linear()),
    "hook": lambda: Of(_halved, a=linear(), b=linear()),
}
WHOLE: dict[str, Callable[[], nn.Module]] = {
    "tied": lambda: Of(lambda own, x: own.a(torch.relu(own.a(x))), a=linear()),
    "recurrent": lambda: Of(lambda own, x: own.a(x[None])[0][0], a=nn.LSTM(8, 8, 2)),
    "output of weights": lambda: Of(lambda own, x: (own.a(x), own.w * 2), a=linear(), w=weight(8)),
}


def _halved(own: Any, x: Tensor) -> Any:
    between = own.a(x)
    between.register_hook(lambda grad: grad / 2)
    return own.b(between)


def tensors(outputs: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


@pytest.mark.parametrize("name", [*SPLIT, *WHOLE])
def test_two_passes_equal_one_to_the_bit(name: str) -> None:
    torch.manual_seed(1)
    make = SPLIT.get(name) or WHOLE[name]
    model = make().double()
    count = 2 if name in ("two inputs", "unused input") else 1
    inputs = [torch.randn(5, 8, dtype=torch.float64, requires_grad=True) for _ in range(count)]
    outputs = tensors(model(*inputs))
    given = [torch.randn_like(one) for one in outputs]
    torch.autograd.backward(outputs, given)
    expected = [one.grad for one in (*inputs, *model.parameters())]
    for one in (*inputs, *model.parameters()):
        one.grad = None
    grads, later = backward_of_inputs(tensors(model(*inputs)), given, inputs)
    if name in SPLIT:
        assert all(one.grad is None for one in (*inputs, *model.parameters()))
    later()
    for found, wanted in zip((*grads, *(one.grad for one in model.parameters())), expected, strict=True):
        assert (found is None) == (wanted is None)
        assert found is None or wanted is None or torch.equal(found, wanted)


def test_gradients_are_added_to_those_of_other_micro_batches() -> None:
    layer, x = linear().double(), torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    later = [backward_of_inputs([layer(x).sum()], None, [x])[1] for _ in range(2)]
    first = [one.grad.clone() for one in layer.parameters() if one.grad is not None]
    for run in later:
        run()
    for one, before in zip(layer.parameters(), first, strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad, 3 * before, rtol=1e-14, atol=0)


def test_stage_whose_inputs_need_no_gradients_defers_all() -> None:
    layer = linear()
    grads, later = backward_of_inputs([layer(torch.randn(3, 8)).sum()], None, [])
    assert grads == []
    assert layer.weight.grad is None
    later()
    assert layer.weight.grad is not None


def test_stage_without_a_graph_has_no_gradients() -> None:
    x = torch.randn(3, requires_grad=True)
    grads, later = backward_of_inputs([], [], [x])
    assert grads == [None]
    later()
    assert x.grad is None
