"""Parts of the built-in tasks for PyTorch: the twin of a thin task, a schedule, layers that can be split."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from evener.data.tasks.thin import Arrays, share_of_peak
from evener.records.task import Task, ThinTask


def twin(thin: ThinTask, **others: Any) -> Task:
    """The task of that name, data, batch and epochs; `others` are its model, loss, optimiser and schedule."""
    assert thin.validation_data is not None
    return Task(
        name=thin.name,
        train_data=partial(_tensors, thin.train_data),
        validation_data=partial(_tensors, thin.validation_data),
        batch_size=thin.batch_size,
        epochs=thin.epochs,
        **others,
    )


def _tensors(read: Callable[[], Arrays]) -> TensorDataset:
    return TensorDataset(*map(torch.from_numpy, read()))


def one_cycle(optimizer: Optimizer, steps: int) -> LambdaLR:
    """The rate goes up to the optimiser's own and down to nothing, see `share_of_peak`."""
    return LambdaLR(optimizer, partial(share_of_peak, steps=steps))


def convolution(inputs: int, outputs: int, batch_norm: bool = True, sides: int = 2) -> list[nn.Module]:
    """A convolution of 3 pixels along each of its `sides` that keeps their sizes, and its normalisation if wanted."""
    kind, norm = (nn.Conv2d, nn.BatchNorm2d) if sides == 2 else (nn.Conv3d, nn.BatchNorm3d)
    layer = kind(inputs, outputs, 3, padding=1, bias=not batch_norm)
    return [layer, norm(outputs)] if batch_norm else [layer]


class ResidualBlock(nn.Module):
    """x -> relu(x + two convolutions of x), [N, C, ...] -> [N, C, ...] (He et al., 2016).

    Args:
        channels: C.
        batch_norm: normalise after every convolution; without it the block starts as the identity (Zhang et al.,
            2019), so that deep stacks of it learn all the same.
        sides: 2 of images, 3 of volumes.
    """

    def __init__(self, channels: int, batch_norm: bool = True, sides: int = 2) -> None:
        super().__init__()
        first, second = (convolution(channels, channels, batch_norm, sides) for _ in range(2))
        if not batch_norm:
            nn.init.zeros_(second[0].weight)  # type: ignore[arg-type]
        self.body = nn.Sequential(*first, nn.ReLU(), *second)
        self.relu = nn.ReLU()

    def forward(self, inputs: Tensor) -> Tensor:
        """The block's output, of the shape of `inputs`."""
        outputs: Tensor = self.relu(inputs + self.body(inputs))
        return outputs


class Normalise(nn.Module):
    """(x - mean) / std, in the model's own floating-point type: data may stay bytes, a quarter of float32's memory.

    Args:
        mean: of the values that come in.
        std: their standard deviation.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: float, std: float) -> None:
        super().__init__()
        for name, value in (("mean", mean), ("std", std)):  # buffers follow .to() and .double()
            self.register_buffer(name, torch.tensor([float(value)]), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        """Floating-point values of the shape of `values`."""
        return (values - self.mean) / self.std
