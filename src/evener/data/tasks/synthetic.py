"""Task `synthetic`: data and a model of any size, made from a seed; for benchmarks, and for trying out a cluster."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.optim import SGD
from torch.utils.data import Dataset

from evener.data.tasks.parts import ResidualBlock, convolution
from evener.records.errors import require
from evener.records.task import Task

HIDDEN = 4096
"""Units of the layer that `parameters="heavy"` adds."""

Shape = tuple[int, ...]


def task(
    data_dir: Path | None = None,
    kind: str = "cnn",
    image: tuple[int, ...] = (3, 32, 32),
    classes: int = 10,
    samples: int = 2048,
    width: int = 32,
    depth: int = 3,
    parameters: str = "light",
    batch_norm: bool = True,
    seed: int = 0,
) -> Task:
    """Learns to tell `classes` random images apart, seen through noise.

    Args:
        data_dir: None, for the data are made.
        kind: "cnn", a residual network (much computing for few parameters), or "mlp", linear layers.
        image: shape of a sample: channels, rows, columns; of a volume channels, planes, rows, columns.
        classes: number of them.
        samples: for training; a quarter as many for validation.
        width: channels of every convolution, or units of every linear layer.
        depth: residual blocks, or hidden layers.
        parameters: "light", or "heavy": with a hidden layer of 4096 units before the output, which adds much to send
            and little to compute.
        batch_norm: normalise after every layer.
        seed: of the data.

    Raises:
        InvalidValue: a size is not positive, or a word is not one of those above.
    """
    require(data_dir is None, "the data folder of task synthetic", str(data_dir), "left out: its data are made")
    require(kind in ("cnn", "mlp"), "kind", kind, "cnn or mlp")
    require(parameters in ("light", "heavy"), "parameters", parameters, "light or heavy")
    allowed = "channels, rows and columns, such as 3x32x32, or 1x16x16x16 for volumes"
    require(len(image) in (3, 4) and min(image) > 0, "image", image, allowed)
    sizes = {"classes": classes, "samples": samples, "width": width, "depth": depth}
    for name, size in sizes.items():
        require(size > 0, name, size, "positive")
    build = _cnn if kind == "cnn" else _mlp
    return Task(
        name=f"synthetic-{kind}",
        model=partial(build, image, classes, width, depth, parameters == "heavy", batch_norm),
        loss=cross_entropy,
        train_data=partial(NoisyImages, image, classes, samples, seed, first=0),
        validation_data=partial(NoisyImages, image, classes, math.ceil(samples / 4), seed, first=samples),
        optimizer=partial(SGD, lr=0.05, momentum=0.9),
        batch_size=64,
    )


class NoisyImages(Dataset[tuple[Tensor, int]]):
    """Pairs of an image (that of its class, smooth, plus noise), float32 [C, ...], and its class; classes take turns.

    Takes the memory of a few images only, whatever its length: each sample's noise is one of 64 images, shifted.

    Args:
        image: (C, H, W), or (C, D, H, W) for volumes.
        classes: number of them.
        samples: length of the data set.
        seed: the same seed gives the same classes and noise.
        first: number of the first sample; data sets of one seed with other numbers have other noise.

    Attributes:
        targets: class of every sample.
    """

    BANK = 64

    def __init__(self, image: Shape, classes: int, samples: int, seed: int, first: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        sides = len(image) - 1
        coarse = torch.randn(classes, image[0], *[4] * sides, generator=generator)
        self._classes = 2 * interpolate(coarse, image[1:], mode="bilinear" if sides == 2 else "trilinear")
        self._noise = torch.randn(self.BANK, *image, generator=generator)
        self._first = first
        self.targets = [(first + index) % classes for index in range(samples)]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = self.targets[index]
        turns, which = divmod(self._first + index, self.BANK)
        noise = self._noise[which].flatten().roll(turns).view_as(self._noise[which])
        return self._classes[label] + noise, label


_MEANS: dict[int, tuple[Callable[..., nn.Module], Callable[..., nn.Module]]] = {
    2: (nn.AvgPool2d, nn.AdaptiveAvgPool2d),
    3: (nn.AvgPool3d, nn.AdaptiveAvgPool3d),
}
"""Of images and volumes: a mean over windows, and one over all pixels."""


def _cnn(image: Shape, classes: int, width: int, depth: int, heavy: bool, batch_norm: bool) -> nn.Module:
    """[N, *image] -> [N, classes]; heavy: the last pixels are averaged to about 4 along each side instead of one."""
    channels, *sizes = image
    sides, window = len(sizes), tuple(max(1, size // 4) for size in sizes)
    means, mean = _MEANS[sides]
    pooled = width * math.prod(size // each for size, each in zip(sizes, window, strict=True)) if heavy else width
    return nn.Sequential(
        *convolution(channels, width, batch_norm, sides),
        nn.ReLU(),
        *(ResidualBlock(width, batch_norm, sides) for _ in range(depth)),
        means(window) if heavy else mean(1),
        nn.Flatten(),
        *_head(pooled, classes, heavy),
    )


def _mlp(image: Shape, classes: int, width: int, depth: int, heavy: bool, batch_norm: bool) -> nn.Module:
    """[N, *image] -> [N, classes]."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in [math.prod(image), *[width] * (depth - 1)]:
        layers.append(nn.Linear(inputs, width, bias=not batch_norm))
        layers += [nn.BatchNorm1d(width)] if batch_norm else []
        layers.append(nn.ReLU())
    return nn.Sequential(*layers, *_head(width, classes, heavy))


def _head(inputs: int, classes: int, heavy: bool) -> list[nn.Module]:
    if not heavy:
        return [nn.Linear(inputs, classes)]
    return [nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes)]
