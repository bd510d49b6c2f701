"""Weights that are computed of others: parametrisations, lazy modules, tied and transposed ones, bounded embeddings."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

from exact.recipe import Kind, images, rows, sequences, tokens

kind = Kind(__name__)


def _convnet(first: nn.Module, second: nn.Module) -> nn.Module:
    return nn.Sequential(first, nn.ReLU(), second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))


_prune: Any = prune


def _conv(inputs: int = 3) -> nn.Conv2d:
    return nn.Conv2d(inputs, 6, 3, padding=1)


@kind(images())
def weight_norm_new() -> nn.Module:
    return _convnet(parametrizations.weight_norm(_conv()), parametrizations.weight_norm(_conv(6)))


@kind(images())
def weight_norm_old() -> nn.Module:
    return _convnet(weight_norm(_conv()), weight_norm(_conv(6)))


@kind(rows())
def weight_norm_linear() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3))


@kind(images(), across=True)
def spectral_norm_new() -> nn.Module:
    return _convnet(parametrizations.spectral_norm(_conv()), _conv(6))


@kind(images(), across=True)
def spectral_norm_old() -> nn.Module:
    return _convnet(spectral_norm(_conv()), spectral_norm(_conv(6)))


@kind(rows(), across=True)
def spectral_norm_linear() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3))


@kind(rows())
def orthogonal() -> nn.Module:
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3))


class _Symmetric(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.triu() + x.triu(1).transpose(-1, -2)


class _Positive(nn.Module):
    def forward(self, x: Any) -> Any:
        return F.softplus(x)


class _Centred(nn.Module):
    def forward(self, x: Any) -> Any:
        return x - x.mean((1, 2, 3), keepdim=True)


class _Standardised(nn.Module):
    def forward(self, x: Any) -> Any:
        return (x - x.mean()) / (x.std() + 1e-3)


@kind(rows())
def symmetric_weight() -> nn.Module:
    layer = nn.Linear(6, 6)
    parametrize.register_parametrization(layer, "weight", _Symmetric())
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(6, 3))


@kind(rows())
def positive_weight() -> nn.Module:
    layer = nn.Linear(6, 8)
    parametrize.register_parametrization(layer, "weight", _Positive())
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 3))


@kind(images())
def centred_weight() -> nn.Module:
    layer = _conv(6)
    parametrize.register_parametrization(layer, "weight", _Centred())
    return _convnet(_conv(), layer)


class _WeightStandardised(nn.Conv2d):
    def forward(self, x: Any) -> Any:
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(x, w / (w.std((1, 2, 3), keepdim=True) + 1e-3), self.bias)


@kind(images())
def weight_standardised() -> nn.Module:
    return _convnet(_WeightStandardised(3, 6, 3), nn.GroupNorm(2, 6))


@kind(images())
def standardised_over_all() -> nn.Module:
    layer = _conv()
    parametrize.register_parametrization(layer, "weight", _Standardised())
    return _convnet(layer, _conv(6))


@kind(images())
def lazy_modules() -> nn.Module:
    model = nn.Sequential(nn.LazyConv2d(6, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))
    model(torch.zeros(2, 3, 8, 6))
    return model


@kind(rows())
def lazy_until_the_first_batch() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3))


@kind(images())
def pruned() -> nn.Module:
    layer = _conv()
    _prune.l1_unstructured(layer, "weight", 0.4)
    return _convnet(layer, _conv(6))


@kind(rows())
def pruned_structured() -> nn.Module:
    layer = nn.Linear(6, 8)
    _prune.ln_structured(layer, "weight", 0.5, n=2, dim=0)
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 3))


@kind(tokens())
def embedding_with_max_norm() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 8, max_norm=1.0), nn.Flatten(), nn.Linear(40, 3))


@kind(tokens())
class TiedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.out = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Any) -> Any:
        return self.out(self.body(self.embed(x)).tanh())


@kind(rows())
class TiedTransposed(nn.Module):
    """An auto-encoder whose decoder is its encoder's weight, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.shift = nn.Linear(6, 8), nn.Parameter(torch.zeros(6))

    def forward(self, x: Any) -> Any:
        return F.linear(self.encode(x).tanh(), self.encode.weight.t(), self.shift)


@kind(rows())
class TiedLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Any) -> Any:
        return self.head(self.second(self.first(x).tanh()).tanh())


@kind(images())
class TiedConvolutionsOfTwoPaces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.near, self.far, self.head = _conv(), nn.Conv2d(3, 6, 3, padding=2, dilation=2), nn.Linear(6, 3)
        self.far.weight = self.near.weight

    def forward(self, x: Any) -> Any:
        return self.head((self.near(x).relu() + self.far(x)).mean((2, 3)))


@kind(rows())
class SharedModule(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.again = self.first

    def forward(self, x: Any) -> Any:
        return self.head(self.again(self.first(x).relu()).relu())


@kind(rows())
class HyperNetwork(nn.Module):
    """A weight that a network makes of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.make, self.head = nn.Parameter(torch.randn(4)), nn.Linear(4, 48), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.head(F.linear(x, self.make(self.code).view(8, 6)).tanh())


@kind(sequences())
def weight_norm_of_recurrent() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = parametrizations.weight_norm(nn.Conv1d(6, 8, 3, padding=1))
            self.rnn, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Any) -> Any:
            y, _ = self.rnn(self.mix(x.transpose(1, 2)).transpose(1, 2))
            return self.head(y[:, -1])

    return Net()


@kind(rows())
class ParameterList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(8, 6) / 3, torch.randn(3, 8) / 3])
        self.scales = nn.ParameterDict({"a": torch.ones(8), "b": torch.ones(3)})

    def forward(self, x: Any) -> Any:
        y = (x @ self.weights[0].t() * self.scales["a"]).tanh()
        return y @ self.weights[1].t() * self.scales["b"]


@kind(images())
class LowRankAdapter(nn.Module):
    """A frozen layer and a small trained one beside it (LoRA), on a copied network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = copy.deepcopy(_convnet(_conv(), _conv(6)))
        self.net.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 6) / 3), nn.Parameter(torch.zeros(3, 2))

    def forward(self, x: Any) -> Any:
        net: Any = self.net
        y = net[:5](x)
        return net[5](y) + y @ self.down.t() @ self.up.t()
