"""What tracing bakes in: branches on the mode, default arguments, counters, buffers that change, paths by values."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from exact.recipe import Kind, images, rows, sequences, tokens

kind = Kind(__name__)


@kind(rows())
class ScalesInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        y = self.body(x).relu()
        return self.head(y * 2 if self.training else y)


@kind(images())
class ExtraBranchInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.extra = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 1)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        y = self.body(x)
        if self.training:
            y = y + self.extra(y)
        return self.head(y.mean((2, 3)))


@kind(images())
class LogitsInTrainingProbabilitiesAfter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        y = self.head(self.body(x).relu().mean((2, 3)))
        return y if self.training else y.softmax(1)


@kind(rows(), draws=True)
class DropoutByDefaultArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.head(F.dropout(self.body(x).relu(), 0.3, training=self.training))


@kind(rows())
class DropoutSwitchedOff(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.head(F.dropout(self.body(x).relu(), 0.3, training=False))


@kind(images(), draws=True)
class DropoutAlwaysOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        return self.head(F.dropout(self.body(x).relu(), 0.3).mean((2, 3)))


@kind(rows(), across=True)
class CountsItsCalls(nn.Module):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        if self.training:
            self.calls += 1
        return self.body(x) / (1 + self.calls)


@kind(rows(), across=True)
class CountsInPython(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = nn.Linear(6, 3), 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.body(x) * (0.9**self.calls)


@kind(rows(), across=True)
class RunningMeanOfItsOwn(nn.Module):
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Any) -> Any:
        y = self.body(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * y.mean(0))
        return self.head(y - self.mean)


@kind(images(), across=True)
class RunningScaleReplaced(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 3)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Any) -> Any:
        y = self.body(x)
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * y.detach().abs().max()
        return self.head((y / self.scale).mean((2, 3)))


@kind(sequences(features=8), across=True)
class VectorQuantiser(nn.Module):
    """Codes that move as a running mean of what chose them (VQ-VAE)."""

    codes: torch.Tensor
    sizes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 4), nn.Linear(4, 8)
        self.register_buffer("codes", torch.randn(5, 4))
        self.register_buffer("sizes", torch.ones(5))

    def forward(self, x: Any) -> Any:
        z = self.encode(x)
        flat = z.reshape(-1, 4)
        chosen = torch.cdist(flat, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(chosen, 5).to(flat.dtype)
                self.sizes.mul_(0.9).add_(0.1 * hot.sum(0))
                self.codes.mul_(0.9).add_(0.1 * (hot.t() @ flat) / self.sizes[:, None])
        q = self.codes[chosen].view_as(z)
        return self.decode(z + (q - z).detach())


@kind(rows(), draws=True)
class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        y = self.stem(x)
        if not self.training:
            return self.head(y + 0.8 * self.branch(y).relu())
        keep = torch.empty(len(y), 1, dtype=y.dtype, device=y.device).bernoulli_(0.8)
        return self.head(y + keep * self.branch(y).relu())


@kind(rows(), across=True, draws=True)
class LayerDropByTorch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: Any) -> Any:
        y = self.stem(x)
        for block in self.blocks:
            if not self.training or torch.rand(()) > 0.4:
                y = y + block(y).tanh()
        return self.head(y)


@kind(rows(), across=True, draws=True)
class LayerDropByPython(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: Any) -> Any:
        y = self.stem(x)
        for block in self.blocks:
            if not self.training or random.random() > 0.4:
                y = y + block(y).tanh()
        return self.head(y)


@kind(rows(), across=True)
class WarmsUpOverSteps(nn.Module):
    step: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, x: Any) -> Any:
        if self.training:
            self.step.add_(1)
        y = self.body(x)
        return self.head(y.relu() if self.step < 2 else y.tanh())


@kind(rows())
class BranchOnValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        return torch.stack([self.large(row) if row.norm() > 2.3 else self.small(row) for row in x])


@kind(rows())
class MutableDefault(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.seen: dict[str, Any] = {}

    def forward(self, x: Any) -> Any:
        self.seen["features"] = self.body(x).relu()
        return self.head(self.seen["features"])


@kind(sequences())
class PositionsCached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.cache: Any = None

    def forward(self, x: Any) -> Any:
        if self.cache is None or self.cache.shape[0] != x.shape[1]:
            self.cache = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None] / 10
        return self.head(self.body(x) + self.cache)


@kind(images())
class OwnCheckpointing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        y = self.stem(x).relu()
        y = checkpoint(self.block, y, use_reentrant=False) if self.training else self.block(y)
        return self.head(y.mean((2, 3)))


@kind(rows())
class UsesEvalInside(nn.Module):
    """A frozen teacher that evaluates whatever the mode around it."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.student = nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        self.teacher.eval()
        with torch.no_grad():
            aim = self.teacher(x)
        return self.student(x) - aim


@kind(tokens())
class MaskFromTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8, padding_idx=0), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        mask = (x != 0).unsqueeze(2)
        y = self.embed(x) * mask
        return self.head(y.sum(1) / mask.sum(1).clamp(min=1))


@kind(images(), across=True)
class DiscretisesByBatchQuantile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        y = self.body(x).mean((2, 3))
        if self.training:
            y = y - y.detach().median(0).values
        return self.head(y)


@kind(images())
class TrainsOnlyItsHead(nn.Module):
    """Its train() keeps the backbone evaluating."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Dropout(0.5))
        self.head = nn.Linear(6, 3)
        self.backbone.requires_grad_(False)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x: Any) -> Any:
        return self.head(self.backbone(x).relu().mean((2, 3)))
