"""The networks of `oracle_live.py` on synthetic images of 32 x 32: a step takes 50 to 500 ms on a core."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from evener.records.task import Task

CLASSES = 10


def plain() -> nn.Module:
    """Wide 5 x 5 convolutions without normalisation."""
    layers: list[nn.Module] = []
    for before, filters in ((3, 32), (32, 64), (64, 96)):
        layers += [nn.Conv2d(before, filters, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(96 * 16, CLASSES))


def vgg() -> nn.Module:
    """Pairs of 3 x 3 convolutions, and two linear layers with most of the parameters."""
    layers: list[nn.Module] = []
    for before, filters in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, filters, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(filters, filters, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 512), nn.ReLU(), nn.Linear(512, CLASSES))


class Block(nn.Module):
    """Two normalised convolutions beside a shortcut."""

    def __init__(self, before: int, filters: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, filters, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(filters)
        self.second = nn.Conv2d(filters, filters, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(filters)
        self.shortcut: nn.Module = nn.Identity()
        if before != filters:
            self.shortcut = nn.Sequential(nn.Conv2d(before, filters, 1, stride, bias=False), nn.BatchNorm2d(filters))

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, F, H / stride, W / stride)."""
        y = self.first_norm(self.first(x)).relu()
        added: Tensor = self.second_norm(self.second(y)) + self.shortcut(x)
        return added.relu()


def resnet() -> nn.Module:
    """A stem and four blocks, normalised."""
    blocks = [Block(32, 32, 1), Block(32, 64, 2), Block(64, 128, 2), Block(128, 128, 1)]
    stem = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))


NETWORKS = {"plain": plain, "vgg": vgg, "resnet": resnet}


def task(network: str = "plain", batch_size: int = 32, samples: int = 512) -> Task:
    """A network of the table on random images."""

    def images() -> Dataset[tuple[Tensor, ...]]:
        torch.manual_seed(0)
        return TensorDataset(torch.randn(samples, 3, 32, 32), torch.randint(0, CLASSES, (samples,)))

    return Task(
        name=network,
        model=NETWORKS[network],
        loss=nn.functional.cross_entropy,
        train_data=images,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.001, momentum=0.9),
        batch_size=batch_size,
        epochs=1,
    )
