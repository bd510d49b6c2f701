"""Networks that the strategies divide in tests: of every structure that real ones have, narrow enough to be quick."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """Of a ResNet: narrow 1x1, 3x3, wide 1x1, around a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.narrow = nn.Sequential(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True))
        self.middle = nn.Sequential(
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True)
        )
        self.wide = nn.Sequential(nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width))
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.wide(self.middle(self.narrow(x)))
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


def residual_net() -> nn.Module:
    """A ResNet of two blocks, of widths that no number of ranks divides."""
    return nn.Sequential(
        nn.Conv2d(3, 7, 7, 2, 3, bias=False),
        nn.BatchNorm2d(7),
        nn.ReLU(True),
        nn.MaxPool2d(3, 2, 1),
        Bottleneck(7, 5),
        Bottleneck(20, 6, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 5),
    )


class OddNet(nn.Module):
    """Odd kernels, strides, paddings, dilations and groups; every kind of pooling and of normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, (5, 2), (3, 1), (4, 1), (1, 2))
        self.group_norm = nn.GroupNorm(3, 12)
        self.depthwise = nn.Conv2d(12, 24, 3, 1, "same", 2, groups=12)
        self.grouped = nn.Conv2d(24, 18, 1, groups=6, padding=2)
        self.instance_norm = nn.InstanceNorm2d(18, affine=True)
        self.average = nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False)
        self.included = nn.AvgPool2d((2, 3), 1, 1)
        self.maximum = nn.MaxPool2d(3, 2, 1, 2, ceil_mode=True)
        self.up = nn.ConvTranspose2d(18, 8, 3, 2, 1, 1, dilation=2)
        self.up_grouped = nn.ConvTranspose2d(8, 6, 2, 3, groups=2, bias=False)
        self.bilinear = nn.Upsample(scale_factor=1.5, mode="bilinear")
        self.pool = nn.AdaptiveAvgPool2d((3, 2))
        self.peak = nn.AdaptiveMaxPool2d((2, 3))
        self.head = nn.Linear(6 * 6 * 2, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.group_norm(self.stem(x)))
        x = torch.sigmoid(self.instance_norm(self.grouped(self.depthwise(x))))
        x = self.up(self.maximum(self.average(x)) * 2.0)
        x = self.up_grouped(F.gelu(self.included(x)))
        x = self.bilinear(x)
        x = torch.cat([self.pool(x), self.peak(x).transpose(2, 3)], 1)
        return self.head(x.view(x.size(0), -1))  # type: ignore[no-any-return]


class DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(True),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(True),
        )


class UNet(nn.Module):
    """Down, up by transposed convolution or by interpolation, with skips; an image of two classes comes out."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.inner = DoubleConv(3, width)
        self.down = DoubleConv(width, 2 * width)
        self.bottom = DoubleConv(2 * width, 4 * width)
        self.up = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.joined = DoubleConv(4 * width, 2 * width)
        self.last = DoubleConv(3 * width, width)
        self.classes = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.inner(x)
        second = self.down(F.max_pool2d(first, 2))
        y = self.up(self.bottom(F.max_pool2d(second, 2)))
        y = self.joined(torch.cat([second, y], dim=1))
        y = F.interpolate(y, size=first.shape[2:], mode="bilinear", align_corners=True)
        return self.classes(self.last(torch.cat((first, y), 1)))  # type: ignore[no-any-return]


class Conv(nn.Module):
    """YOLO's convolution: with BatchNorm and SiLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(outputs)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))  # type: ignore[no-any-return]


class YoloBottleneck(nn.Module):
    def __init__(self, width: int, shortcut: bool) -> None:
        super().__init__()
        self.cv1, self.cv2 = Conv(width, width, 3), Conv(width, width, 3)
        self.add = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cv2(self.cv1(x)) if self.add else self.cv2(self.cv1(x))  # type: ignore[no-any-return]


class C2f(nn.Module):
    """Half of the channels pass through n bottlenecks, of which each one's output is kept."""

    def __init__(self, inputs: int, outputs: int, n: int = 1, shortcut: bool = False) -> None:
        super().__init__()
        self.width = outputs // 2
        self.cv1 = Conv(inputs, 2 * self.width)
        self.cv2 = Conv((2 + n) * self.width, outputs)
        self.m = nn.ModuleList(YoloBottleneck(self.width, shortcut) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        y = list(self.cv1(x).chunk(2, 1))
        y.extend(m(y[-1]) for m in self.m)
        return self.cv2(torch.cat(y, 1))  # type: ignore[no-any-return]


class SPPF(nn.Module):
    """Three poolings in a row, all of which are kept."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.cv1, self.cv2 = Conv(inputs, inputs // 2), Conv(inputs * 2, outputs)
        self.m = nn.MaxPool2d(5, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = [self.cv1(x)]
        y.extend(self.m(y[-1]) for _ in range(3))
        return self.cv2(torch.cat(y, 1))  # type: ignore[no-any-return]


class YoloV8(nn.Module):
    """Backbone and neck of YOLOv8; with the published widths it is that of YOLOv8n. Three maps of features come out."""

    def __init__(self, widths: tuple[int, int, int, int, int] = (16, 32, 64, 128, 256)) -> None:
        super().__init__()
        a, b, c, d, e = widths
        self.p1, self.p2 = Conv(3, a, 3, 2), nn.Sequential(Conv(a, b, 3, 2), C2f(b, b, 1, True))
        self.p3 = nn.Sequential(Conv(b, c, 3, 2), C2f(c, c, 2, True))
        self.p4 = nn.Sequential(Conv(c, d, 3, 2), C2f(d, d, 2, True))
        self.p5 = nn.Sequential(Conv(d, e, 3, 2), C2f(e, e, 1, True), SPPF(e, e))
        self.upsample = nn.Upsample(scale_factor=2)
        self.up4, self.up3 = C2f(e + d, d), C2f(d + c, c)
        self.down4, self.out4 = Conv(c, c, 3, 2), C2f(c + d, d)
        self.down5, self.out5 = Conv(d, d, 3, 2), C2f(d + e, e)

    def forward(self, x: Tensor) -> list[Tensor]:
        p3 = self.p3(self.p2(self.p1(x)))
        p4 = self.p4(p3)
        p5 = self.p5(p4)
        n4 = self.up4(torch.cat([self.upsample(p5), p4], 1))
        n3 = self.up3(torch.cat([self.upsample(n4), p3], 1))
        m4 = self.out4(torch.cat([self.down4(n3), n4], 1))
        m5 = self.out5(torch.cat([self.down5(m4), p5], 1))
        return [n3, m4, m5]


class Mixed(nn.Module):
    """What cannot be divided amid what can: attention over pixels, a squeezed gate, a weight that is no module's."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 9, 3, padding=1)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(9, 4, 1), nn.ReLU(), nn.Conv2d(4, 9, 1))
        self.scale = nn.Parameter(torch.full((9, 1, 1), 0.5))
        self.norm = nn.LayerNorm(9)
        self.leave = nn.Conv2d(9, 5, 3, padding=1)
        self.spread = nn.Conv2d(5, 5, 1, padding=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.enter(x)
        x = x * torch.sigmoid(self.gate(x)) * self.scale
        pixels = self.norm(x.flatten(2).transpose(1, 2))
        mixed = pixels + torch.softmax(pixels @ pixels.transpose(1, 2), -1) @ pixels
        x = x + mixed.transpose(1, 2).reshape(x.shape)
        y = self.leave(x)
        pooled = self.spread(y.mean((2, 3), keepdim=True))
        return {"image": y + F.interpolate(pooled, size=y.shape[2:]), "mean": y.mean(dim=(2, 3))}


def normalised_first() -> nn.Module:
    """Begins with BatchNorm: without channels of its own, a rank has no weight there that needs a gradient."""
    return nn.Sequential(
        nn.BatchNorm2d(3),
        nn.Conv2d(3, 3, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(3, 2, 3, padding=1),
        nn.AdaptiveAvgPool2d((2, 1)),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


class VolumeNet(nn.Module):
    """Volumes: odd strides and dilations, groups, poolings, a transposed convolution, trilinear resizing."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv3d(2, 6, (3, 5, 3), (2, 1, 1), (1, 2, 1)), nn.BatchNorm3d(6), nn.ReLU())
        self.middle = nn.Sequential(
            nn.Conv3d(6, 6, 3, padding="same", dilation=(1, 2, 1), groups=3),
            nn.InstanceNorm3d(6, affine=True),
            nn.AvgPool3d(3, 2, 1, ceil_mode=True, count_include_pad=False),
        )
        self.up = nn.ConvTranspose3d(6, 5, (3, 2, 2), 2, (1, 0, 0))
        self.grow = nn.Upsample(scale_factor=(2, 1, 1), mode="trilinear")
        self.least = nn.AdaptiveMaxPool3d((3, 2, 1))
        self.decide = nn.Linear(11 * 6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool3d(self.enter(x), 2, 1)
        y = self.grow(self.up(self.middle(x)))
        x = torch.cat([F.interpolate(x, size=y.shape[2:]), y], 1)
        means = torch.flatten(x.mean((2, 3, 4)), 1)
        decided: Tensor = self.decide(torch.flatten(self.least(x), 1)) + means[:, :4]
        return decided


@dataclass(frozen=True)
class Case:
    """A network and the inputs to compare it with.

    Attributes:
        build: a new network.
        shape: of the inputs of the whole batch.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]


CASES = {
    "residual": Case(residual_net, (4, 3, 29, 31)),
    "odd": Case(OddNet, (4, 3, 34, 19)),
    "unet": Case(UNet, (3, 3, 20, 12)),
    "yolo": Case(lambda: YoloV8((4, 6, 8, 10, 14)), (3, 3, 64, 64)),
    "normalised first": Case(normalised_first, (3, 3, 5, 5)),
    "mixed": Case(Mixed, (3, 3, 7, 5)),
    "volumes": Case(VolumeNet, (3, 2, 11, 9, 6)),
}
