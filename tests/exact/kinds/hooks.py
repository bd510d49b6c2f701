"""Hooks: before and after forward, of modules and parameters, of every step's gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from exact.recipe import Kind, images, rows

kind = Kind(__name__)


def _mlp() -> Any:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def _convnet() -> Any:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


@kind(images())
def forward_hook_scales() -> Any:
    model = _convnet()
    model[0].register_forward_hook(lambda module, args, output: output * 0.5)
    return model


@kind(rows())
def forward_hook_adds() -> Any:
    model = _mlp()
    model[2].register_forward_hook(lambda module, args, output: output + args[0])
    return model


@kind(images())
def pre_hook_standardises() -> Any:
    model = _convnet()
    model[2].register_forward_pre_hook(lambda module, args: (args[0] - args[0].mean((2, 3), keepdim=True),))
    return model


@kind(rows())
def pre_hook_on_the_model() -> Any:
    model = _mlp()
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2 - 0.1,))
    return model


@kind(rows())
def hook_on_the_model() -> Any:
    model = _mlp()
    model.register_forward_hook(lambda module, args, output: output.softmax(1))
    return model


@kind(images())
class FeaturesByHook(nn.Module):
    """Takes what it returns from a hook (a perceptual feature)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _convnet()
        self.found: dict[str, Any] = {}
        self.net[1].register_forward_hook(self._keep)

    def _keep(self, module: Any, args: Any, output: Any) -> None:
        self.found["features"] = output

    def forward(self, x: Any) -> Any:
        return self.net(x), self.found["features"].mean((2, 3))


@kind(images())
def backward_hook_clamps() -> Any:
    model = _convnet()
    model[2].register_full_backward_hook(lambda module, grads, outs: (grads[0].clamp(-1e-3, 1e-3),))
    return model


@kind(rows())
def backward_pre_hook_scales() -> Any:
    model = _mlp()
    model[2].register_full_backward_pre_hook(lambda module, grads: (grads[0] * 0.3,))
    return model


@kind(rows())
def parameter_hook_masks() -> Any:
    model = _mlp()
    mask = (torch.arange(64).view(8, 8) % 3 > 0).double()
    model[2].weight.register_hook(lambda grad: grad * mask)
    return model


@kind(images())
def parameter_hook_centralises() -> Any:
    model = _convnet()
    for layer in (model[0], model[2]):
        layer.weight.register_hook(lambda grad: grad - grad.mean((1, 2, 3), keepdim=True))
    return model


@kind(rows())
def parameter_hook_centralises_linear() -> Any:
    model = _mlp()
    for layer in (model[0], model[2]):
        layer.weight.register_hook(lambda grad: grad - grad.mean(1, keepdim=True))
    return model


@kind(rows())
def parameter_hook_normalises() -> Any:
    model = _mlp()
    model[0].weight.register_hook(lambda grad: grad / (grad.norm() + 1e-3))
    return model


@kind(rows())
def parameter_hook_clamps() -> Any:
    model = _mlp()
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad.clamp(-2e-3, 2e-3))
    return model


@kind(rows())
def parameter_hook_doubles() -> Any:
    model = _mlp()
    model[4].bias.register_hook(lambda grad: grad * 2)
    return model


@kind(rows())
def post_accumulate_hook_scales() -> Any:
    model = _mlp()

    def scale(parameter: Any) -> None:
        parameter.grad.mul_(0.5)

    model[0].weight.register_post_accumulate_grad_hook(scale)
    return model


@kind(rows())
def post_accumulate_hook_normalises() -> Any:
    model = _mlp()

    def normalise(parameter: Any) -> None:
        parameter.grad.div_(parameter.grad.norm() + 1e-3)

    model[2].weight.register_post_accumulate_grad_hook(normalise)
    return model


@kind(rows())
def removed_hook() -> Any:
    model = _mlp()
    handle = model[0].register_forward_hook(lambda module, args, output: output * 5)
    handle.remove()
    return model


@kind(rows())
class PatchedForward(nn.Module):
    """A forward that was replaced on the instance."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _mlp()
        layer: Any = self.net[2]
        plain = layer.forward
        layer.forward = lambda x: plain(x) + x

    def forward(self, x: Any) -> Any:
        return self.net(x)


@kind(images())
class HookedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Linear(6, 3)
        self.norm.register_forward_hook(lambda module, args, output: output.clamp(-1, 1))

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.body(x)).mean((2, 3)))
