"""Clipping beside tied weights; scalar parameters, sparse gradients, parameters that nothing uses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from exact.recipe import Kind, descent, images, rows, tokens

kind = Kind(__name__)


def _plain(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)


@kind(rows(), clip=0.05)
def clipped_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


@kind(images(), clip=0.05)
def clipped_convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(32, 3)
    )


@kind(tokens(), clip=0.05)
class ClippedTied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.out = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)
        self.out.weight = self.embed.weight

    def forward(self, x: Any) -> Any:
        return self.out(self.body(self.embed(x)).tanh())


@kind(rows(), clip=0.05)
class ClippedTiedLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: Any) -> Any:
        return self.last(self.middle(self.first(x).tanh()).tanh())


@kind(rows(), clip=0.05)
class ClippedUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.spare, self.head = nn.Linear(6, 8), nn.Linear(5, 5), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x).tanh())


@kind(rows())
class UnusedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.spare, self.head = nn.Linear(6, 8), nn.Linear(5, 5), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x).tanh())


@kind(images(), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3, weight_decay=0.1))
class UnusedParameterDecays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.spare = nn.Conv2d(3, 6, 3), nn.Linear(6, 3), nn.Parameter(torch.ones(7))

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x).relu().mean((2, 3)))


@kind(rows())
class UsedInEvaluationOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.late, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        y = self.body(x).tanh()
        return self.head(y if self.training else self.late(y))


@kind(rows())
class OutputThatNoLossReads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.aside, self.head = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        y = self.body(x).tanh()
        return self.head(y), self.aside(y).argmax(1)


@kind(images(), clip=0.1)
class ScalarGain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.gain, self.head = nn.Conv2d(3, 6, 3), nn.Parameter(torch.tensor(0.7)), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        return self.head((self.body(x) * self.gain).relu().mean((2, 3)))


@kind(rows())
class LearnedTemperature(nn.Module):
    """As in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.protos = nn.Linear(6, 8), nn.Parameter(torch.randn(4, 8))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Any) -> Any:
        y = nn.functional.normalize(self.body(x), dim=1)
        return self.scale.exp() * y @ nn.functional.normalize(self.protos, dim=1).t()


@kind(images())
def learned_slope() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.PReLU(), nn.Conv2d(6, 4, 3), nn.PReLU(4), nn.Flatten(), nn.Linear(32, 3)
    )


@kind(images())
class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.gamma, self.head = nn.Parameter(torch.full((6, 1, 1), 0.1)), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        y = self.stem(x)
        return self.head((y + self.gamma * self.block(y)).mean((2, 3)))


@kind(tokens(), optimizer=_plain)
def sparse_embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 8, sparse=True), nn.Flatten(), nn.Linear(40, 3))


@kind(tokens(), optimizer=_plain)
def embedding_bag() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(11, 8, mode="mean"), nn.Linear(8, 3))


@kind(tokens(), optimizer=lambda p: torch.optim.SparseAdam(list(p), lr=1e-2))
def sparse_bag_alone() -> nn.Module:
    return nn.EmbeddingBag(11, 8, mode="sum", sparse=True)


@kind(rows())
def one_layer() -> nn.Module:
    return nn.Linear(6, 3)


@kind(rows())
class EmptyParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.none = nn.Linear(6, 3), nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Any) -> Any:
        return self.body(x) + self.none.sum(0)


@kind(rows(), optimizer=descent, clip=0.05)
class FrozenBeside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fixed, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.fixed.requires_grad_(False)

    def forward(self, x: Any) -> Any:
        return self.head(self.fixed(x).tanh())
