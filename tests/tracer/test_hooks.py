"""What forward hooks do is a part of the graph; modules with backward hooks are one operation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from evener.tracer.tracing import CPU, NotTraceable, trace
from support.refusals import refused

ROWS = torch.zeros(3, 4)


def _targets(model: nn.Module) -> list[str]:
    return [str(getattr(node.target, "__name__", node.target)) for node in trace(model, ROWS, CPU).operations]


def test_forward_hooks_become_operations_around_their_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[0].register_forward_pre_hook(lambda module, args: (args[0].tanh(),))
    model[0].register_forward_hook(lambda module, args, output: output.exp())
    assert _targets(model) == ["tanh", "0", "exp", "1"]


def test_hooks_that_compute_weights_stay_inside_the_module() -> None:
    model, layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4)
    layer.scaled = layer.weight.detach() * 2
    model[0] = layer
    layer.register_forward_pre_hook(lambda module, args: setattr(module, "scaled", module.weight * 2))
    assert _targets(model) == ["0", "1"]


def test_module_with_backward_hooks_is_one_operation() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Tanh())
    model[0].register_full_backward_hook(lambda module, grads, outs: None)
    assert _targets(model) == ["0", "1"]


def test_weights_outside_the_model_are_refused() -> None:
    stray = nn.Parameter(torch.ones(4))

    class Captures(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + stray * 2

    with refused(NotTraceable):
        trace(Captures(), ROWS, CPU)
