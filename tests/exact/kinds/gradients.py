"""Where gradients are stopped, bent, or made by the user's own functions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from exact.recipe import Kind, images, rows, sequences

kind = Kind(__name__)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.next, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1), nn.Linear(6, 3)

    def end(self, y: Any) -> Any:
        return self.head(self.next(y).mean((2, 3)))


@kind(images())
class NoGradInside(_Net):
    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            y = self.body(x).relu()
        return self.end(y)


@kind(images())
class PartWithoutGrad(_Net):
    def forward(self, x: Any) -> Any:
        y = self.body(x)
        with torch.no_grad():
            scale = y.abs().mean((1, 2, 3), keepdim=True)
        return self.end(y / scale)


@kind(images())
class DetachedBranch(_Net):
    def forward(self, x: Any) -> Any:
        y = self.body(x).relu()
        return self.end(y + y.detach().tanh())


@kind(rows())
class StopGradientTwins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.guess = nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        a, b = self.encode(x), self.encode(x * 0.9)
        return F.cosine_similarity(self.guess(a), b.detach(), dim=1) + F.cosine_similarity(
            self.guess(b), a.detach(), dim=1
        )


@kind(rows())
class DecoratedNoGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fixed, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    @torch.no_grad()
    def features(self, x: Any) -> Any:
        return self.fixed(x).relu()

    def forward(self, x: Any) -> Any:
        return self.head(self.features(x))


@kind(rows())
class FrozenChild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fixed, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.fixed.requires_grad_(False)

    def forward(self, x: Any) -> Any:
        return self.head(self.fixed(x).relu())


@kind(rows())
class FrozenBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.body.bias.requires_grad_(False)

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x).relu())


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return -0.5 * dy


_reverse: Any = _Reverse.apply


@kind(images())
class GradientReversal(_Net):
    def forward(self, x: Any) -> Any:
        y = self.body(x).relu()
        return self.end(_reverse(y)) + self.head(y.mean((2, 3)))


class _Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        (x,) = ctx.saved_tensors
        return dy * (x.abs() <= 1)


_sign: Any = _Sign.apply


@kind(rows())
class BinaryWeights(nn.Module):
    """Weights that are rounded on the way, with a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.head(F.linear(x, _sign(self.body.weight), self.body.bias).tanh())


class _BinaryConv(nn.Conv2d):
    def forward(self, x: Any) -> Any:
        return F.conv2d(x, _sign(self.weight), self.bias, self.stride, self.padding)


@kind(images())
def binary_convolution() -> nn.Module:
    return nn.Sequential(_BinaryConv(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 3, 3), nn.Flatten(), nn.Linear(72, 3))


@kind(rows())
class StraightThroughRound(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        y = self.body(x)
        return self.head(y + (y.round() - y).detach())


@kind(rows())
class GradInsideForward(nn.Module):
    """A gradient in the forward pass: a learned potential's force."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Any) -> Any:
        with torch.enable_grad():
            place = x.detach().requires_grad_()
            total = self.energy(place).sum()
            (force,) = torch.autograd.grad(total, place, create_graph=self.training)
        return -force


@kind(images())
class ClampedGradient(_Net):
    def forward(self, x: Any) -> Any:
        y = self.body(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        return self.end(y)


@kind(images())
class ScaledGradient(_Net):
    def forward(self, x: Any) -> Any:
        y = self.body(x).relu()
        return self.end(0.1 * y + 0.9 * y.detach())


@kind(rows())
class InferenceSidePath(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        with torch.set_grad_enabled(not self.training):
            hint = self.body(x).mean(1, keepdim=True)
        return self.head(self.body(x).relu()) + hint


@kind(sequences())
class TruncatedThroughTime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        h = x.new_zeros(x.shape[0], 8)
        for i in range(x.shape[1]):
            h = self.cell(x[:, i], h)
            if i == 2:
                h = h.detach()
        return self.head(h)
