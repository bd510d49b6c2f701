"""BatchNorm in other clothes, and the other norms."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from exact.recipe import Kind, images, rows, sequences

kind = Kind(__name__)


def _net(norm: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(96, 3)
    )


@kind(images())
def batch_norm() -> nn.Module:
    return _net(nn.BatchNorm2d(6))


@kind(images())
def batch_norm_without_running() -> nn.Module:
    return _net(nn.BatchNorm2d(6, track_running_stats=False))


@kind(images())
def batch_norm_cumulative() -> nn.Module:
    return _net(nn.BatchNorm2d(6, momentum=None))


@kind(images())
def batch_norm_plain() -> nn.Module:
    return _net(nn.BatchNorm2d(6, affine=False))


class _Relued(nn.BatchNorm2d):
    def forward(self, x: Any) -> Any:
        return super().forward(x).tanh()


@kind(images())
def batch_norm_with_activation() -> nn.Module:
    return _net(_Relued(6))


class _Named(nn.BatchNorm2d):
    """A sub-class that changes nothing but a default."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-3, momentum=0.03)


@kind(images())
def batch_norm_of_other_defaults() -> nn.Module:
    return _net(_Named(6))


class _Conditional(nn.BatchNorm2d):
    """Scaled by its input's own statistics."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, affine=False)
        self.scale = nn.Linear(channels, channels)

    def forward(self, x: Any) -> Any:
        return super().forward(x) * self.scale(x.mean((2, 3)))[:, :, None, None]


@kind(images())
def batch_norm_conditional() -> nn.Module:
    return _net(_Conditional(6))


class _Frozen(nn.Module):
    """As in torchvision.ops."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.rand(channels) + 0.5)
        self.register_buffer("bias", torch.randn(channels))

    def forward(self, x: Any) -> Any:
        return x * self.weight[:, None, None] + self.bias[:, None, None]


@kind(images())
def frozen_batch_norm() -> nn.Module:
    return _net(_Frozen(6))


@kind(images(), across=True)
class FunctionalBatchNorm(nn.Module):
    mean: torch.Tensor
    var: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 6, 3), nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))

    def forward(self, x: Any) -> Any:
        y = F.batch_norm(self.body(x), self.mean, self.var, training=self.training)
        return self.head(y.relu().mean((2, 3)))


@kind(images(), across=True)
class OwnBatchStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 6, 3), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        y = self.body(x)
        if self.training:
            y = (y - y.mean((0, 2, 3), keepdim=True)) / (y.std((0, 2, 3), keepdim=True) + 1e-3)
        return self.head(y.relu().mean((2, 3)))


@kind(images())
class OneNormTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.next = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(6), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        y = self.norm(self.body(x)).relu()
        return self.head(self.norm(self.next(y)).relu().mean((2, 3)))


@kind(images())
class OneNormAtTwoSizes(nn.Module):
    """A head that several levels of a pyramid share."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.down = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, stride=2, padding=1)
        self.head = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 2, 1))

    def forward(self, x: Any) -> Any:
        y = self.body(x)
        return self.head(y), self.head(self.down(y))


@kind(images())
class SiameseNorm(nn.Module):
    """Two views through one network, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))

    def forward(self, x: Any) -> Any:
        return self.net(x) * self.net(x.flip(3))


@kind(images())
class CheckpointedNorm(nn.Module):
    """A block with a norm that the user computes twice to save memory."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 6, 3), nn.Linear(6, 3)
        self.block = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())

    def forward(self, x: Any) -> Any:
        y = self.stem(x)
        y = checkpoint(self.block, y, use_reentrant=False)
        return self.head(y.mean((2, 3)))


@kind(images())
class CheckpointedNormTheOldWay(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 6, 3), nn.Linear(6, 3)
        self.block = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())

    def forward(self, x: Any) -> Any:
        y = self.stem(x)
        y = checkpoint(self.block, y, use_reentrant=True) if self.training else self.block(y)
        return self.head(y.mean((2, 3)))


@kind(images())
def sync_batch_norm() -> nn.Module:
    norm: Any = nn.SyncBatchNorm
    model: nn.Module = norm.convert_sync_batchnorm(_net(nn.BatchNorm2d(6)))
    return model


@kind(images())
def instance_norm() -> nn.Module:
    return _net(nn.InstanceNorm2d(6, affine=True))


@kind(images(), across=True)
def instance_norm_with_running() -> nn.Module:
    return _net(nn.InstanceNorm2d(6, affine=True, track_running_stats=True))


@kind(images())
def group_norm() -> nn.Module:
    return _net(nn.GroupNorm(3, 6))


@kind(rows())
def group_norm_of_rows() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(4, 8), nn.ReLU(), nn.Linear(8, 3))


@kind(images())
def layer_norm_of_images() -> nn.Module:
    return _net(nn.LayerNorm([6, 8, 6]))


@kind(images())
class ChannelsLastLayerNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Conv2d(3, 6, 3), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        y = self.norm(self.body(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.head(y.mean((2, 3)))


@kind(images())
def local_response() -> nn.Module:
    return _net(nn.LocalResponseNorm(3))


@kind(sequences())
def rms_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8), nn.Linear(8, 3))


@kind(rows())
def batch_norm_of_rows() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@kind(sequences())
class BatchNormOfSequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Conv1d(6, 8, 3, padding=1), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.body(x.transpose(1, 2))).mean(2))


@kind(images())
class BatchNormOfUnitsOnTwoInputs(nn.Module):
    """Tokens and images through one BatchNorm1d: (N, C) and (N, C, L)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Conv2d(3, 6, 3), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        y = self.norm(self.body(x).flatten(2))
        return self.head(self.norm(y.mean(2)))


@kind(images())
class NormInEvalAlways(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        self.norm.eval()
        return self.head(self.norm(self.body(x)).relu().mean((2, 3)))


@kind(images())
class MomentumThatChanges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Linear(6, 3)
        self.steps = 0

    def forward(self, x: Any) -> Any:
        if self.training:
            self.steps += 1
            self.norm.momentum = 0.5 / self.steps
        return self.head(self.norm(self.body(x)).relu().mean((2, 3)))
