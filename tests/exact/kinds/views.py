"""In-place changes: of values, through views, chunks and aliases, of inputs and of slices."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from exact.recipe import Kind, images, rows, sequences

kind = Kind(__name__)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.next, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1), nn.Linear(6, 3)

    def end(self, y: Any) -> Any:
        return self.head(self.next(y).mean((2, 3)))


@kind(images())
class ReluThroughSlice(_Net):
    def forward(self, x: Any) -> Any:
        y = self.body(x)
        first = y[:, :3]
        first.relu_()
        return self.end(y)


@kind(images())
class AddsThroughSlice(_Net):
    def forward(self, x: Any) -> Any:
        y = self.body(x)
        y[:, :2] += 1
        return self.end(y)


@kind(images())
class AssignsSlice(_Net):
    def forward(self, x: Any) -> Any:
        y = self.body(x)
        y[:, :, 0] = 0
        return self.end(y)


@kind(images())
class MultipliesThroughNarrow(_Net):
    def forward(self, x: Any) -> Any:
        y = self.body(x)
        y.narrow(2, 1, 3).mul_(2)
        return self.end(y)


@kind(images())
class ChangesThroughView(_Net):
    def forward(self, x: Any) -> Any:
        y = self.body(x)
        y.view(x.shape[0], -1).tanh_()
        return self.end(y)


@kind(images())
class ChangesThroughAlias(_Net):
    def forward(self, x: Any) -> Any:
        y = self.body(x)
        same = y.detach()
        same.clamp_(min=-1)
        return self.end(y)


@kind(images())
class InPlaceAfterResidual(_Net):
    def forward(self, x: Any) -> Any:
        y = self.body(x)
        kept = y
        y = F.relu(y, inplace=True)
        return self.end(y + kept)


@kind(images())
def inplace_activations() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 4, 3),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Flatten(),
        nn.Linear(96, 3),
    )


@kind(images())
class NormalisesItsInput(_Net):
    def forward(self, x: Any) -> Any:
        x.sub_(0.2).div_(1.3)
        return self.end(self.body(x).relu())


@kind(images())
class ChangesInputUsedBefore(_Net):
    def forward(self, x: Any) -> Any:
        y = self.body(x * 2)
        x.mul_(0.5)
        return self.end(y + self.body(x))


@kind(images())
class ChunksWithoutGrad(_Net):
    """Halves that are changed where PyTorch allows it: without gradients."""

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            y = self.body(x)
            first, second = y.chunk(2, 1)
            first.relu_()
            second.mul_(2)
        return self.end(y)


@kind(rows())
class IndexPut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        y = self.body(x)
        out = torch.zeros_like(y)
        out[:, ::2] = y[:, 1::2]
        return self.head(out)


@kind(rows())
class FillsDiagonal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        a, b = self.left(x).view(-1, 4, 2), self.right(x).view(-1, 2, 4)
        scores = a @ b
        scores.diagonal(dim1=1, dim2=2).zero_()
        return self.head(scores.softmax(2).sum(1))


@kind(sequences())
class MasksInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.head = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        mask = torch.ones(x.shape[1], x.shape[1], device=x.device).triu(1).bool()
        scores.masked_fill_(mask, float("-inf"))
        return self.head(scores.softmax(2) @ x)


@kind(sequences())
class RotatesHalves(nn.Module):
    """Rotary positions, written through views."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        y = self.body(x)
        angle = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None] / 7
        out = torch.empty_like(y)
        even, odd = y[..., ::2], y[..., 1::2]
        out[..., ::2] = even * angle.cos() - odd * angle.sin()
        out[..., 1::2] = even * angle.sin() + odd * angle.cos()
        return self.head(out)


@kind(rows())
class AccumulatesInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([nn.Linear(6, 8) for _ in range(3)]), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        total = x.new_zeros(x.shape[0], 8)
        for layer in self.layers:
            total += layer(x).sigmoid()
        return self.head(total)


@kind(rows())
class CopiesInto(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        both = x.new_empty(x.shape[0], 8)
        both[:, :4].copy_(self.left(x))
        both[:, 4:].copy_(self.right(x))
        return self.head(both)


@kind(images())
class WritesOut(_Net):
    def forward(self, x: Any) -> Any:
        y = self.body(x)
        with torch.no_grad():
            shift = torch.empty_like(y)
            torch.mean(y, (2, 3), keepdim=True).expand_as(y)
            torch.mul(y, 0.1, out=shift)
        return self.end(y - shift)


@kind(images())
class TransposedViewChanged(_Net):
    def forward(self, x: Any) -> Any:
        y = self.body(x)
        channels_last = y.permute(0, 2, 3, 1)
        channels_last.add_(torch.arange(6, dtype=x.dtype, device=x.device))
        return self.end(y)
