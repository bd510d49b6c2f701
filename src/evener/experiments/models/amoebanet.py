"""AmoebaNet-D (Real et al., 2019), the image classifier that GPipe was measured on (Huang et al., 2019).

Its cells are those of `oracle/zoo/amoebanet.py`, which says what they compute.

    stem: convolution, two reduction cells          H/8
    layers / 3 normal cells                         H/8
    reduction cell, layers / 3 normal cells         H/16
    reduction cell, layers / 3 normal cells         H/32
    mean over pixels, linear classifier

N samples, H rows, W columns; AmoebaNet-D (18, 256) has 123 million parameters, (18, 544) has 543, (72, 512) 1840.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from evener.oracle.zoo.amoebanet import REDUCTION, Recipe, cells
from evener.records.errors import require


def _unit(
    inputs: int, outputs: int, size: tuple[int, int] = (1, 1), stride: tuple[int, int] = (1, 1)
) -> list[nn.Module]:
    """Return a ReLU, a convolution that keeps H and W except for the stride, and a BatchNorm."""
    padding = (size[0] // 2, size[1] // 2)
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding, bias=False)
    return [nn.ReLU(), convolution, nn.BatchNorm2d(outputs)]


def _conv_3x3(channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    return nn.Sequential(
        *_unit(channels, narrow),
        *_unit(narrow, narrow, (3, 3), (stride, stride)),
        *_unit(narrow, channels),
    )


def _conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    return nn.Sequential(
        *_unit(channels, narrow),
        *_unit(narrow, narrow, (1, 7), (1, stride)),
        *_unit(narrow, narrow, (7, 1), (stride, 1)),
        *_unit(narrow, channels),
    )


_OPERATIONS: dict[str, Callable[[int, int], nn.Module]] = {
    "identity": lambda _channels, _stride: nn.Identity(),
    "max_2x2": lambda _channels, stride: nn.MaxPool2d(2, stride, ceil_mode=True),
    "max_3x3": lambda _channels, stride: nn.MaxPool2d(3, stride, padding=1),
    "average_3x3": lambda _channels, stride: nn.AvgPool2d(3, stride, padding=1, count_include_pad=False),
    "conv_1x1": lambda channels, stride: nn.Sequential(*_unit(channels, channels, stride=(stride, stride))),
    "conv_3x3": _conv_3x3,
    "conv_1x7_7x1": _conv_1x7_7x1,
}
"""A function from channels and stride to a module that keeps the channels, by operation."""


class _Halve(nn.Module):
    """[N, C, H, W] -> [N, F, ceil(H/2), ceil(W/2)]: half of the filters read even pixels, the others odd ones."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs - outputs // 2, 1, 2, bias=False)
        self.shift = nn.ZeroPad2d((-1, 1, -1, 1))
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        halves = torch.cat((self.even(x), self.odd(self.shift(x))), dim=1)
        outputs: Tensor = self.norm(halves)
        return outputs


class _Cell(nn.Module):
    """One cell; each of its states has `channels` channels."""

    def __init__(self, recipe: Recipe, before: int, last: int, channels: int, after_reduction: bool) -> None:
        super().__init__()
        self.recipe = recipe
        self.outputs = channels * len(recipe.returned)
        self.adapt_last = nn.Sequential(*_unit(last, channels))
        self.adapt_before: nn.Module = nn.Identity()
        if after_reduction:
            self.adapt_before = _Halve(before, channels)
        elif before != channels:
            self.adapt_before = nn.Sequential(*_unit(before, channels))
        strided = recipe is REDUCTION
        self.operations = nn.ModuleList(
            _OPERATIONS[what](channels, 2 if strided and state < 2 else 1)
            for pair in recipe.sums
            for state, what in pair
        )

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        states = [self.adapt_last(last), self.adapt_before(before)]
        operations = iter(self.operations)
        for (one, _), (other, _) in self.recipe.sums:
            states.append(next(operations)(states[one]) + next(operations)(states[other]))
        return torch.cat([states[i] for i in self.recipe.returned], dim=1)


class AmoebaNetD(nn.Module):
    """AmoebaNet-D (layers, filters): [N, 3, H, W] -> logits [N, classes]; ImageNet's images have H = W = 224.

    Args:
        layers: number of normal cells, a multiple of 3.
        filters: size of the model, a multiple of 16.
        classes: number of classes.
    """

    def __init__(self, layers: int = 18, filters: int = 256, classes: int = 1000) -> None:
        require(layers > 0 and layers % 3 == 0, "layers", layers, "a positive multiple of 3")
        require(filters > 0 and filters % 16 == 0, "filters", filters, "a positive multiple of 16")
        super().__init__()
        channels = filters // 4
        self.stem = nn.Sequential(
            nn.ReLU(), nn.Conv2d(3, channels, 3, 2, padding=1, bias=False), nn.BatchNorm2d(channels)
        )
        self.cells = nn.ModuleList()
        before = last = channels
        after_reduction = False
        for recipe in cells(layers):
            channels *= 2 if recipe is REDUCTION else 1
            cell = _Cell(recipe, before, last, channels, after_reduction)
            self.cells.append(cell)
            before, last, after_reduction = last, cell.outputs, recipe is REDUCTION
        self.classify = nn.Linear(last, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of `images`."""
        before = last = self.stem(images)
        for cell in self.cells:
            before, last = last, cell(before, last)
        logits: Tensor = self.classify(last.mean((2, 3)))
        return logits
