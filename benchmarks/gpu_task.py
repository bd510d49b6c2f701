"""Networks as people train them on GPUs, on data drawn in advance: the task of gpu.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from evener import Task
from evener.experiments.models.resnet import resnet152

WORDS, CONTEXT = 50_304, 1024


class ChannelsLast(nn.Module):
    """A network of convolutions in the layout in which GPUs compute them fastest."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        for weight in inner.parameters():
            if weight.dim() == 4:
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.inner(images.contiguous(memory_format=torch.channels_last))
        return out


class Gpt(nn.Module):
    """A decoder of GPT-2's sizes: 124 million parameters at 12 layers of 768, words and outputs with one matrix."""

    def __init__(self, layers: int = 12, width: int = 768, words: int = WORDS, context: int = CONTEXT) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(words, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.word.weight

    def forward(self, tokens: Tensor) -> Tensor:
        count = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(count, device=tokens.device)
        x = self.word(tokens) + self.place(torch.arange(count, device=tokens.device))
        logits: Tensor = self.head(self.blocks(x, mask=mask, is_causal=True))
        return logits


def next_word(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Kind(NamedTuple):
    """A network, its loss, samples of a batch, and what its samples are."""

    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch_size: int
    data: Callable[[int], TensorDataset]


def images(count: int, side: int = 224, classes: int = 1000) -> TensorDataset:
    return TensorDataset(torch.randn(count, 3, side, side), torch.randint(0, classes, (count,)))


def tokens(count: int, words: int = WORDS, context: int = CONTEXT) -> TensorDataset:
    drawn = torch.randint(0, words, (count, context + 1))
    return TensorDataset(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())


KINDS = {
    "resnet50": Kind(lambda: ChannelsLast(resnet152(depths=(3, 4, 6, 3))), F.cross_entropy, 256, images),
    "gpt": Kind(Gpt, next_word, 16, tokens),
    "small-resnet": Kind(
        lambda: ChannelsLast(resnet152(10, 8, depths=(1, 1, 2, 1))),
        F.cross_entropy,
        16,
        lambda count: images(count, 32, 10),
    ),
    "small-gpt": Kind(lambda: Gpt(2, 64, 100, 32), next_word, 8, lambda count: tokens(count, 100, 32)),
}
"""By name; the small ones are for trying the benchmark without a GPU."""


def task(network: str = "resnet50", batches: int = 4) -> Task:
    """A task of `network`, with data for so many batches."""
    kind = KINDS[network]

    def data() -> TensorDataset:
        torch.manual_seed(1)
        return kind.data(batches * kind.batch_size)

    return Task(
        name=network,
        model=kind.model,
        loss=kind.loss,
        train_data=data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        batch_size=kind.batch_size,
        epochs=1,
    )
