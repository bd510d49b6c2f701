"""Shapes of tracing time, padding modes, resizing, flat inputs, coordinates, states, channels in odd places."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from exact.recipe import Kind, images, rows, sequences, together, tokens

kind = Kind(__name__)


def _net(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d((2, 1)), nn.Flatten(), nn.LazyLinear(3))


def _built(model: nn.Module, channels: int = 3) -> nn.Module:
    with torch.no_grad():
        model.eval()(torch.zeros(2, channels, 8, 6))
    return model.train()


@kind(images())
class ViewOfBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(288, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x).view(x.size(0), -1))


@kind(images())
class ReshapeByNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(48, 3)

    def forward(self, x: Any) -> Any:
        n, c, h, w = self.body(x).shape
        return self.head(self.body(x).reshape(n, c * h, w).transpose(1, 2))


@kind(images())
class PixelsAsTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.mix, self.back = nn.Conv2d(3, 8, 2, stride=2), nn.Linear(12, 12), nn.Conv2d(8, 3, 1)

    def forward(self, x: Any) -> Any:
        y = self.body(x)
        n, c, h, w = y.shape
        z = self.mix(y.flatten(2)).relu()
        return self.back(z.view(n, c, h, w))


@kind(images(8))
class ChannelShuffle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        n, c, h, w = y.shape
        y = y.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)
        return self.head(self.second(y).mean((2, 3)))


@kind(images())
def pixel_shuffle() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.PixelShuffle(2), nn.ReLU(), nn.Conv2d(3, 2, 3))


@kind(images())
def pixel_unshuffle() -> nn.Module:
    return nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(12, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 2, 1))


for _mode in ("reflect", "replicate", "circular"):
    kind.add(
        f"padding_{_mode}",
        lambda mode=_mode: _built(_net(nn.Conv2d(3, 6, 3, padding=1, padding_mode=mode), nn.ReLU())),  # type: ignore[misc]
        images(),
    )
for _padding in (
    nn.ReflectionPad2d(1),
    nn.ReplicationPad2d((1, 0, 2, 1)),
    nn.ZeroPad2d((2, 1, 0, 1)),
    nn.CircularPad2d(1),
):
    kind.add(
        type(_padding).__name__,
        lambda padding=_padding: _built(_net(padding, nn.Conv2d(3, 6, 3), nn.ReLU())),  # type: ignore[misc]
        images(),
    )
for _mode in ("bicubic", "nearest-exact", "bilinear", "area", "nearest"):
    kind.add(
        f"upsample_{_mode.replace('-', '_')}",
        lambda mode=_mode: _built(
            _net(nn.Conv2d(3, 6, 3, padding=1), nn.Upsample(scale_factor=1.5, mode=mode), nn.Conv2d(6, 4, 3))
        ),  # type: ignore[misc]
        images(),
    )


@kind(images())
class ResizesToInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.Conv2d(6, 2, 3, padding=1)

    def forward(self, x: Any) -> Any:
        y = F.interpolate(self.down(x), size=x.shape[2:], mode="bilinear", align_corners=False, antialias=False)
        return self.up(y)


@kind(images())
class AntialiasedResize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.next = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 2, 3)

    def forward(self, x: Any) -> Any:
        return self.next(F.interpolate(self.body(x), size=(5, 4), mode="bilinear", antialias=True))


@kind(images())
class TransposedToSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 6, 3, stride=2), nn.ConvTranspose2d(6, 3, 3, stride=2)

    def forward(self, x: Any) -> Any:
        return self.up(self.down(x).relu(), output_size=x.shape[2:])


@kind(images())
def transposed_with_output_padding() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.ReLU(), nn.ConvTranspose2d(6, 3, 3, 2, 1, output_padding=1)
    )


@kind(images())
class CoordinateChannels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(5, 6, 3, padding=1), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        n, _, h, w = x.shape
        ys = torch.linspace(-1, 1, h, dtype=x.dtype, device=x.device).view(1, 1, h, 1).expand(n, 1, h, w)
        xs = torch.linspace(-1, 1, w, dtype=x.dtype, device=x.device).view(1, 1, 1, w).expand(n, 1, h, w)
        return self.head(self.body(torch.cat((x, ys, xs), 1)).relu().mean((2, 3)))


@kind(images())
class PositionsOfPatches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.place = nn.Conv2d(3, 8, 2, stride=2), nn.Parameter(torch.randn(1, 8, 4, 3))
        self.next, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.next(self.patch(x) + self.place).mean((2, 3)))


@kind(together(sequences(), rows(8)))
class StateGiven(nn.Module):
    """A recurrent network whose first state is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Any, state: Any) -> Any:
        y, last = self.rnn(x, state[None].contiguous())
        return self.head(y[:, -1]) + self.head(last[0])


@kind(lambda g, n: {"x": images()(g, n), "scale": rows(1)(g, n)})
class NamedInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 6, 3), nn.Linear(6, 3)

    def forward(self, *, x: Any, scale: Any) -> Any:
        return self.head(self.body(x).relu().mean((2, 3))) * scale


@kind(rows())
def conv1d_of_rows() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


@kind(lambda g, n: torch.randn(n, 2, 4, 5, 4, generator=g, dtype=torch.float64))
def conv3d() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1),
        nn.BatchNorm3d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


@kind(tokens())
def conv_of_tokens() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix, self.head = nn.Embedding(11, 6), nn.Conv1d(6, 8, 3, padding=1), nn.Linear(8, 3)

        def forward(self, x: Any) -> Any:
            return self.head(self.mix(self.embed(x).transpose(1, 2)).relu().amax(2))

    return Net()


@kind(images())
class SqueezesWithoutDim(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 6, 3), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        y = F.adaptive_avg_pool2d(self.body(x), 1).squeeze(3).squeeze(2)
        return self.head(y)


@kind(images())
class SqueezeAndExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.down, self.up = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        y = self.body(x)
        gate = self.up(self.down(y.mean((2, 3), keepdim=True)).relu()).sigmoid()
        return self.head((y * gate).mean((-2, -1)))


@kind(images())
class PyramidPooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.mix = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(12, 3, 1)

    def forward(self, x: Any) -> Any:
        y = self.body(x)
        levels = [F.interpolate(F.adaptive_avg_pool2d(y, k), size=y.shape[2:], mode="nearest") for k in (1, 2)]
        return self.mix(torch.cat((y, *levels), 1))


@kind(images())
class CropsAndPads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.side, self.head = nn.Conv2d(3, 6, 3), nn.Conv2d(3, 6, 1), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        y = self.body(x) + self.side(x)[:, :, 1:-1, 1:-1]
        return self.head(F.pad(y, (1, 1, 2, 0)).amax((2, 3)))


@kind(images())
class FlipsAndRolls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.next, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        y = self.body(x)
        return self.head(self.next(torch.roll(y, 2, 2) + y.flip(2)).mean((2, 3)))


@kind(images())
class UnfoldsPatches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.mix = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(16, 5)

    def forward(self, x: Any) -> Any:
        return self.mix(F.unfold(self.body(x), 2, stride=2).transpose(1, 2))


@kind(images())
class CumulatesOverRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.next = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 2, 3)

    def forward(self, x: Any) -> Any:
        return self.next(self.body(x).cumsum(2) / 8)


@kind(images())
class SoftmaxOverPixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.look, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(3, 1, 3, padding=1), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        weight = self.look(x).flatten(2).softmax(2).view(x.shape[0], 1, *x.shape[2:])
        return self.head((self.body(x) * weight).sum((2, 3)))


@kind(images())
def softmax_over_channels() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.Softmax(1), nn.Conv2d(6, 4, 1), nn.Softmax2d())


@kind(images(4))
def gated_linear_units() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.GLU(1), nn.Conv2d(4, 3, 1))


@kind(images())
def ceil_mode_pools() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.AvgPool2d(2, ceil_mode=True),
        nn.Conv2d(6, 2, 1),
    )


@kind(images())
def odd_pools() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.LPPool2d(2, 2), nn.AvgPool2d(2, 1, divisor_override=3), nn.Conv2d(6, 2, 1)
    )


@kind(rows())
def bilinear_of_itself() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.pair = nn.Linear(6, 4), nn.Bilinear(4, 6, 3)

        def forward(self, x: Any) -> Any:
            return self.pair(self.body(x), x)

    return Net()


@kind(images())
class DynamicKernels(nn.Module):
    """Convolves every sample with a kernel of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.head = nn.Linear(3, 27), nn.Conv2d(3, 2, 3)

    def forward(self, x: Any) -> Any:
        n, c, h, w = x.shape
        kernels = self.make(x.mean((2, 3))).view(n * c, 1, 3, 3)
        y = F.conv2d(x.reshape(1, n * c, h, w), kernels, padding=1, groups=n * c)
        return self.head(y.view(n, c, h, w))


@kind(images())
class EinsumAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Conv2d(3, 12, 1), nn.Conv2d(4, 3, 1)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).flatten(2).chunk(3, 1)
        scores = torch.einsum("ncx,ncy->nxy", q, k).softmax(2)
        return self.out(torch.einsum("nxy,ncy->ncx", scores, v).view(x.shape[0], 4, *x.shape[2:]))


@kind(sequences(features=8))
class ScaledDotProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        n, t, _ = x.shape
        q, k, v = (y.view(n, t, 2, 4).transpose(1, 2) for y in self.qkv(x).chunk(3, 2))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, 8))


@kind(rows())
class MatmulByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(6, 8) / 3), nn.Parameter(torch.zeros(8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.head(torch.addmm(self.shift, x, self.weight).relu())
