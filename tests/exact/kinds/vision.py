"""Small networks in the manner of torchvision's and of the usual research code."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.ops import MLP, Conv2dNormActivation, FrozenBatchNorm2d, Permute, SqueezeExcitation, StochasticDepth

from exact.recipe import Kind, images

kind = Kind(__name__)


class _Residual(nn.Module):
    def __init__(self, c: int, depth: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c), nn.ReLU(inplace=True), nn.Conv2d(c, c, 1)
        )
        self.depth = StochasticDepth(depth, "row") if depth else nn.Identity()

    def forward(self, x: Any) -> Any:
        return F.relu(x + self.depth(self.body(x)))


@kind(images())
def residual() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), _Residual(6), _Residual(6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)
    )


@kind(images(), draws=True)
def stochastic_depth_of_rows() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), _Residual(6, 0.4), _Residual(6, 0.4), nn.Flatten(), nn.Linear(144, 3))


@kind(images(), across=True, draws=True)
def stochastic_depth_of_batch() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.block, self.head = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3, padding=1), nn.Linear(6, 3)
            self.depth = StochasticDepth(0.5, "batch")

        def forward(self, x: Any) -> Any:
            y = self.stem(x)
            return self.head((y + self.depth(self.block(y))).mean((2, 3)))

    return Net()


_Auxiliary = namedtuple("_Auxiliary", ["logits", "aux"])


def _auxiliary_loss(outputs: Any, targets: Any) -> Any:
    def one(y: Any) -> Any:
        return ((y.tanh() * (1 + y)).mean(1) * (1 + targets)).mean()

    return one(outputs[0]) + 0.3 * one(outputs[1]) if isinstance(outputs, tuple) else one(outputs)


@kind(images(), loss=_auxiliary_loss)
class AuxiliaryInTraining(nn.Module):
    """As GoogLeNet: another structure in training than in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.more = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3)
        self.aux, self.head = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        y = self.body(x).relu()
        logits = self.head(self.more(y).relu().mean((2, 3)))
        return _Auxiliary(logits, self.aux(y.mean((2, 3)))) if self.training else logits


@kind(images())
class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.three = Conv2dNormActivation(3, 4, 1), Conv2dNormActivation(3, 4, 3)
        self.five = nn.Sequential(Conv2dNormActivation(3, 2, 1), Conv2dNormActivation(2, 4, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), Conv2dNormActivation(3, 2, 1))
        self.head = nn.Linear(14, 3)

    def forward(self, x: Any) -> Any:
        return self.head(torch.cat([part(x) for part in (self.one, self.three, self.five, self.pool)], 1).mean((2, 3)))


@kind(images())
class DenseBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Sequential(nn.BatchNorm2d(3 + 2 * i), nn.ReLU(), nn.Conv2d(3 + 2 * i, 2, 3, padding=1))
                for i in range(3)
            ]
        )
        self.head = nn.Linear(9, 3)

    def forward(self, x: Any) -> Any:
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return self.head(torch.cat(found, 1).mean((2, 3)))


@kind(images())
class InvertedResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = Conv2dNormActivation(3, 4, 3, activation_layer=nn.ReLU6)
        self.expand = Conv2dNormActivation(4, 8, 1, activation_layer=nn.Hardswish)
        self.depth = Conv2dNormActivation(8, 8, 3, groups=8, activation_layer=nn.Hardswish)
        self.squeeze, self.project = SqueezeExcitation(8, 2), Conv2dNormActivation(8, 4, 1, activation_layer=None)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        y = self.stem(x)
        return self.head((y + self.project(self.squeeze(self.depth(self.expand(y))))).mean((2, 3)))


class _ConvNextBlock(nn.Module):
    def __init__(self, c: int, depth: float) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(c, c, 5, padding=2, groups=c),
            Permute([0, 2, 3, 1]),
            nn.LayerNorm(c),
            nn.Linear(c, 2 * c),
            nn.GELU(),
            nn.Linear(2 * c, c),
            Permute([0, 3, 1, 2]),
        )
        self.layer_scale = nn.Parameter(torch.ones(c, 1, 1) * 1e-1)
        self.depth = StochasticDepth(depth, "row")

    def forward(self, x: Any) -> Any:
        return x + self.depth(self.layer_scale * self.block(x))


@kind(images())
def conv_next() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 2, stride=2), _ConvNextBlock(6, 0.0), _ConvNextBlock(6, 0.0), nn.Flatten(), nn.Linear(72, 3)
    )


@kind(images(), draws=True)
def conv_next_with_stochastic_depth() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 2, stride=2), _ConvNextBlock(6, 0.3), _ConvNextBlock(6, 0.5), nn.Flatten(), nn.Linear(72, 3)
    )


class _EncoderBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attend, self.mlp = nn.MultiheadAttention(8, 2, batch_first=True), MLP(8, [16, 8], dropout=0.0)

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        y, _ = self.attend(y, y, y, need_weights=False)
        x = x + y
        return x + self.mlp(self.second(x))


@kind(images())
class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 8, 2, stride=2), nn.Parameter(torch.randn(1, 1, 8) / 3)
        self.place = nn.Parameter(torch.randn(1, 13, 8) / 3)
        self.blocks, self.norm, self.head = (
            nn.Sequential(_EncoderBlock(), _EncoderBlock()),
            nn.LayerNorm(8),
            nn.Linear(8, 3),
        )

    def forward(self, x: Any) -> Any:
        n = x.shape[0]
        y = self.patch(x).reshape(n, 8, -1).permute(0, 2, 1)
        y = torch.cat([self.token.expand(n, -1, -1), y], 1) + self.place
        return self.head(self.norm(self.blocks(y))[:, 0])


@kind(images(3, 8, 8))
class ShiftedWindows(nn.Module):
    """As Swin: attention in windows that are rolled."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.norm = nn.Conv2d(3, 8, 2, stride=2), nn.LayerNorm(8)
        self.qkv, self.out, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 3)
        self.bias = nn.Parameter(torch.randn(2, 4, 4) / 5)

    def windows(self, y: Any, shift: int) -> Any:
        n, h, w, c = y.shape
        z = torch.roll(self.norm(y), (-shift, -shift), (1, 2))
        z = z.view(n, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
        q, k, v = self.qkv(z).reshape(-1, 4, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        z = ((q @ k.transpose(-2, -1)) / 2 + self.bias).softmax(-1) @ v
        z = self.out(z.transpose(1, 2).reshape(-1, 4, c))
        z = z.view(n, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, c)
        return y + torch.roll(z, (shift, shift), (1, 2))

    def forward(self, x: Any) -> Any:
        y = self.patch(x).permute(0, 2, 3, 1)
        return self.head(self.windows(self.windows(y, 0), 1).mean((1, 2)))


@kind(images(3, 8, 8))
class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Conv2dNormActivation(3, 4, 3), Conv2dNormActivation(4, 8, 3)
        self.up, self.last = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: Any) -> Any:
        a = self.first(x)
        b = self.second(F.max_pool2d(a, 2))
        return self.last(torch.cat((a, self.up(b)), 1))


@kind(images(3, 8, 8))
class FeaturePyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 6, 3, 2, 1)])
        self.sides = nn.ModuleList([nn.Conv2d(4, 4, 1), nn.Conv2d(6, 4, 1)])
        self.head = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Any) -> Any:
        levels = []
        for stage in self.stages:
            x = stage(x).relu()
            levels.append(x)
        top = self.sides[1](levels[1])
        below = self.sides[0](levels[0]) + F.interpolate(top, size=levels[0].shape[-2:], mode="nearest")
        return {"0": self.head(below), "1": self.head(top)}


@kind(images())
class SegmentationWithAux(nn.Module):
    """As torchvision's FCN: an OrderedDict of maps at the size of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.aux, self.out = nn.Conv2d(3, 6, 3, 2, 1), nn.Conv2d(6, 2, 1), nn.Conv2d(6, 2, 1)

    def forward(self, x: Any) -> Any:
        y = self.body(x).relu()
        resized = {
            name: F.interpolate(part(y), size=x.shape[-2:], mode="bilinear", align_corners=False)
            for name, part in (("out", self.out), ("aux", self.aux))
        }
        return resized if self.training else {"out": resized["out"], "aux": resized["aux"]}


@kind(images())
def frozen_backbone() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), FrozenBatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


@kind(images())
class RegNetStem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = Conv2dNormActivation(3, 8, 3, stride=2)
        self.block, self.skip = (
            Conv2dNormActivation(8, 8, 3, groups=4),
            Conv2dNormActivation(8, 8, 1, activation_layer=None),
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        y = self.stem(x)
        return self.head((self.block(y) + self.skip(y)).relu().mean((2, 3)))
