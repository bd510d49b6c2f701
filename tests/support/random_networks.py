"""Networks that hypothesis draws."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from evener.tracer.meta_model import on_meta


@st.composite
def convolutions(draw: st.DrawFn, channels: int) -> tuple[nn.Module, int]:
    """A convolution that keeps images larger than nothing, of any kernel, stride, padding, dilation and groups."""
    groups = draw(st.sampled_from([g for g in (1, 2, channels) if channels % g == 0]))
    filters = groups * draw(st.integers(1, 3))
    kernel, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    padding = draw(st.integers(0, 4))
    padding = max(padding, dilation * (kernel - 1) // 2)  # else deep networks run out of pixels
    stride = draw(st.integers(1, 3))
    settings: dict[str, Any] = {"groups": groups, "dilation": dilation, "padding": padding}
    return nn.Conv2d(channels, filters, kernel, stride, bias=draw(st.booleans()), **settings), filters


@st.composite
def networks(draw: st.DrawFn) -> nn.Sequential:
    torch.manual_seed(draw(st.integers(0, 1000)))
    channels, layers = 3, []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["conv", "conv", "norm", "group", "pool", "mean", "up", "twice", "transposed"]))
        if kind == "conv":
            layer, channels = draw(convolutions(channels))
            layers.append(layer)
        elif kind == "norm":
            layers.append(_shifted(nn.BatchNorm2d(channels)))
        elif kind == "group":
            layers.append(_shifted(nn.GroupNorm(draw(st.sampled_from([1, channels])), channels)))
        elif kind == "pool":
            layers.append(nn.MaxPool2d(3, draw(st.integers(1, 2)), 1))
        elif kind == "mean":
            layers.append(nn.AvgPool2d(2, 1, 1, count_include_pad=draw(st.booleans())))
        elif kind == "up":
            layers.append(nn.Upsample(scale_factor=draw(st.sampled_from([1.5, 2.0])), mode="nearest"))
        elif kind == "transposed":
            layers.append(nn.ConvTranspose2d(channels, 4, draw(st.integers(1, 3)), draw(st.integers(1, 3))))
            channels = 4
        else:
            layers.append(Twice(nn.Conv2d(channels, channels, 3, padding=1)))
            channels *= 2
        layers.append(draw(st.sampled_from([nn.Identity(), nn.SiLU(), nn.LeakyReLU(0.3)])))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d((2, 1)), nn.Flatten(), nn.Linear(2 * channels, 3))


def _shifted(norm: nn.Module) -> nn.Module:
    """Else a mean over all pixels that follows is zero but for rounding, which then chooses the side of a kink."""
    nn.init.uniform_(norm.bias, 0.1, 0.5)  # type: ignore[arg-type]
    return norm


class Twice(nn.Module):
    """A layer that is used twice, with its input beside."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.layer(torch.tanh(self.layer(x))) + x], 1)


def runs_alone(model: nn.Sequential, size: tuple[int, int]) -> bool:
    """Whether PyTorch itself takes one image: it refuses kernels larger than what is left, and norms of one value."""
    try:
        on_meta(model)(torch.empty(1, 3, *size, device="meta"))
    except (RuntimeError, ValueError):
        return False
    return True
