"""Random draws of every kind: masks, slopes, noise, choices; where the guarantees promise those of one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from exact.recipe import Kind, images, rows, sequences

kind = Kind(__name__)


def _convnet(noise: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), noise, nn.Conv2d(6, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3)
    )


for _name, _layer in {
    "dropout": nn.Dropout(0.3),
    "dropout2d": nn.Dropout2d(0.3),
    "alpha_dropout": nn.AlphaDropout(0.2),
    "feature_alpha_dropout": nn.FeatureAlphaDropout(0.2),
    "rrelu": nn.RReLU(),
}.items():
    kind.add(_name, lambda layer=_layer: _convnet(layer), images(), draws=True)  # type: ignore[misc]


@kind(rows(), draws=True)
def dropout_of_rows() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.4), nn.Linear(8, 3))


@kind(sequences(), draws=True)
def dropout1d() -> nn.Module:
    return nn.Sequential(nn.Conv1d(5, 6, 3), nn.Dropout1d(0.4), nn.Flatten(), nn.Linear(24, 3))


@kind(sequences(features=8), draws=True)
def transformer_with_dropout() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 3))


@kind(sequences(), draws=True)
class LstmWithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 8, num_layers=2, dropout=0.3, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.rnn(x)[0][:, -1])


@kind(images(), draws=True)
class AddsNoise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        y = self.body(x)
        if self.training:
            y = y + 0.3 * torch.randn_like(y)
        return self.head(y.relu().mean((2, 3)))


@kind(rows(), draws=True)
class Reparametrised(nn.Module):
    """A variational auto-encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale, self.decode = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 6)

    def forward(self, x: Any) -> Any:
        mean, scale = self.mean(x), self.scale(x).exp()
        z = mean + scale * torch.randn_like(scale)
        return self.decode(z), mean, scale


@kind(rows(), draws=True)
class GumbelSoftmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Any) -> Any:
        return self.head(F.gumbel_softmax(self.body(x), tau=1.0))


@kind(images(), draws=True)
class DropPathPerSample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 1), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        y = self.stem(x)
        z = self.block(y)
        if self.training:
            z = z * (torch.rand(x.shape[0], 1, 1, 1, dtype=x.dtype, device=x.device) < 0.7) / 0.7
        return self.head((y + z).mean((2, 3)))


@kind(images(), draws=True)
class DropBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        y = self.stem(x)
        if self.training:
            seeds = (torch.rand(y.shape[0], 1, *y.shape[2:], dtype=y.dtype, device=y.device) < 0.1).to(y.dtype)
            y = y * (1 - F.max_pool2d(seeds, 3, 1, 1))
        return self.head(y.mean((2, 3)))


@kind(rows(), across=True, draws=True)
class MixesSamples(nn.Module):
    """Manifold mixup: samples of the batch are mixed with a random partner."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        y = self.body(x).tanh()
        if self.training:
            y = 0.7 * y + 0.3 * y[torch.randperm(len(y), device=y.device)]
        return self.head(y)


@kind(images(), across=True, draws=True)
class RandomShiftOfAll(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        if self.training:
            x = torch.roll(x, int(torch.randint(0, 3, ())), 3)
        return self.head(self.body(x).relu().mean((2, 3)))


@kind(rows(), draws=True)
class NoisyWeights(nn.Module):
    """Noise on the weights, as in noisy networks: one draw for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale = nn.Parameter(torch.randn(8, 6) / 3), nn.Parameter(torch.full((8, 6), 0.1))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        weight = self.mean + self.scale * torch.randn_like(self.mean) if self.training else self.mean
        return self.head(F.linear(x, weight).tanh())


@kind(images(), draws=True)
class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 3)
        self.generator = torch.Generator().manual_seed(5)

    def __deepcopy__(self, memo: Any) -> Any:
        made = type(self)()
        made.load_state_dict(self.state_dict())
        return made.to(next(self.parameters()).dtype)

    def forward(self, x: Any) -> Any:
        y = self.body(x)
        if self.training:
            y = y + 0.1 * torch.randn(y.shape, generator=self.generator, dtype=y.dtype)
        return self.head(y.mean((2, 3)))


@kind(images())
class DrawsInEvaluationToo(nn.Module):
    """A random projection that is seeded by hand each time."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        generator = torch.Generator().manual_seed(1)
        projection = torch.randn(6, 4, generator=generator, dtype=x.dtype)
        return self.head(self.body(x).relu().mean((2, 3)) @ projection)
