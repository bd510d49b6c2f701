"""U-Net (Ronneberger et al., 2015): every level on the way up also reads the output of that level on the way down."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from evener.records.errors import require


class _Level(nn.Sequential):
    """Two convolutions that keep H and W, each with BatchNorm and ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            convolution = nn.Conv2d(channels, outputs, 3, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """[N, C, H, W] -> [N, classes, H, W]; H and W are multiples of 2 ** depth.

    Args:
        inputs: C.
        classes: number of classes of a pixel.
        width: channels of the topmost level; they double with every level.
        depth: number of times that H and W are halved.
    """

    def __init__(self, inputs: int = 3, classes: int = 2, width: int = 64, depth: int = 4) -> None:
        require(depth > 0, "depth", depth, "positive")
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.pool = nn.MaxPool2d(2)
        self.down = nn.ModuleList(_Level(a, b) for a, b in zip([inputs, *widths], widths[:-1], strict=False))
        self.bottom = _Level(widths[-2], widths[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.join = nn.ModuleList(_Level(2 * w, w) for w in reversed(widths[:-1]))
        self.classify = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of every pixel."""
        x, skips = images, []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat((skips.pop(), up(x)), dim=1))
        logits: Tensor = self.classify(x)
        return logits
