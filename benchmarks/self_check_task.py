"""Networks for `self_check.py`: a ResNet-50 on small images, and a Transformer encoder; random data."""

from __future__ import annotations

import torchvision_operators  # noqa: F401  (registers the operators before torchvision is imported)

# isort: split
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from torchvision.models import resnet50

from evener import Task

SAMPLES, CLASSES, TOKENS, LENGTH, DIM = 48, 10, 100, 64, 256


class Encoder(nn.Module):
    """Tokens [N, 64] -> scores of classes [N, 10], by six layers of 256 dims."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 4, 1024, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.scores = nn.Linear(DIM, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of every sequence."""
        scores: Tensor = self.scores(self.layers(self.embedding(tokens)).mean(1))
        return scores


def images() -> TensorDataset:
    """Random images of three channels."""
    return TensorDataset(torch.randn(SAMPLES, 3, 64, 64), torch.randint(0, CLASSES, (SAMPLES,)))


def sequences() -> TensorDataset:
    """Random sequences of tokens."""
    return TensorDataset(torch.randint(0, TOKENS, (SAMPLES, LENGTH)), torch.randint(0, CLASSES, (SAMPLES,)))


def task(network: str) -> Task:
    """Task of a `network`: resnet50 or transformer."""

    def data() -> TensorDataset:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return images() if network == "resnet50" else sequences()

    def model() -> nn.Module:
        return resnet50(num_classes=CLASSES) if network == "resnet50" else Encoder()

    return Task(name=network, model=model, loss=cross_entropy, train_data=data, batch_size=16, epochs=1)
