"""The block of residual networks (He et al., 2016) that keeps its shape, made of modules so that it can be split."""

from __future__ import annotations

from torch import Tensor, nn


def convolution(inputs: int, outputs: int, batch_norm: bool = True) -> list[nn.Module]:
    """A 3x3 convolution that keeps H and W, and its normalisation if wanted."""
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=not batch_norm)
    return [layer, nn.BatchNorm2d(outputs)] if batch_norm else [layer]


class ResidualBlock(nn.Module):
    """x -> relu(x + two convolutions of x), [N, C, H, W] -> [N, C, H, W].

    Args:
        channels: C.
        batch_norm: normalise after every convolution; without it the block starts as the identity (Zhang et al.,
            2019), so that deep stacks of it learn all the same.
    """

    def __init__(self, channels: int, batch_norm: bool = True) -> None:
        super().__init__()
        first, second = (convolution(channels, channels, batch_norm) for _ in range(2))
        if not batch_norm:
            nn.init.zeros_(second[0].weight)  # type: ignore[arg-type]
        self.body = nn.Sequential(*first, nn.ReLU(), *second)
        self.relu = nn.ReLU()

    def forward(self, inputs: Tensor) -> Tensor:
        """The block's output, of the shape of `inputs`."""
        outputs: Tensor = self.relu(inputs + self.body(inputs))
        return outputs
