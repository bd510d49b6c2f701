"""Modules that return tuples, named tuples, dictionaries, data classes."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from exact.recipe import Kind, images, rows, sequences, together, tokens

kind = Kind(__name__)


@kind(sequences())
class LstmLastStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        states, _ = self.rnn(x)
        return self.head(states[:, -1])


@kind(sequences())
class LstmHidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Any) -> Any:
        _, (hidden, cell) = self.rnn(x)
        return self.head(torch.cat((hidden[-1], cell[-1]), 1))


@kind(sequences())
class GruBothWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(6, 5, bidirectional=True, batch_first=True), nn.Linear(10, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.rnn(x)[0].mean(1))


@kind(tokens())
class RnnOfTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(11, 6), nn.RNN(6, 8, batch_first=True), nn.Linear(8, 11)

    def forward(self, x: Any) -> Any:
        return self.head(self.rnn(self.embed(x))[0])


@kind(sequences())
class GruTimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(6, 8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        out, _ = self.rnn(x.transpose(0, 1))
        return self.head(out.transpose(0, 1))


@kind(sequences())
class LstmCellLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(6, 8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        h = c = x.new_zeros(x.shape[0], 8)
        for i in range(x.shape[1]):
            h, c = self.cell(x[:, i], (h, c))
        return self.head(h)


@kind(sequences(features=8))
class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        y, _ = self.attend(x, x, x)
        return self.head(self.norm(x + y)).mean(1)


@kind(sequences(features=8))
class AttentionWithWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        y, weights = self.attend(x, x, x, need_weights=True, average_attn_weights=False)
        return self.head(y), weights


@kind(sequences(features=8))
class CausalAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device), 1)
        return self.head(self.attend(x, x, x, attn_mask=mask, need_weights=False)[0])


@kind(sequences(features=8))
def transformer_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 3))


@kind(together(sequences(5, 8), sequences(4, 8)))
class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Any, y: Any) -> Any:
        return self.head(self.model(x, y))


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.left(x), self.right(x)


@kind(rows())
class TupleFromChild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.heads = nn.Linear(6, 8), _TwoHeads()

    def forward(self, x: Any) -> Any:
        a, b = self.heads(self.first(x).relu())
        return a * b.sigmoid()


class Pair(NamedTuple):
    mean: Any
    scale: Any


@kind(images())
class ReturnsNamedTuple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.scale = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Any) -> Any:
        y = self.body(x).relu().mean((2, 3))
        return Pair(mean=self.mean(y), scale=self.scale(y).exp())


@dataclass
class Prediction:
    logits: Any
    features: Any


@kind(rows())
class ReturnsDataClass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        y = self.body(x).tanh()
        return Prediction(logits=self.head(y), features=y)


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)

    def forward(self, x: Any) -> Any:
        y = self.body(x)
        return Prediction(logits=y.tanh(), features=y)


@kind(rows())
class DataClassInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = _Inner(), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        found = self.inner(x)
        return self.head(found.logits + 0.1 * found.features)


@kind(images())
class ReturnsDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        y = self.body(x).relu()
        return {"out": self.head(y.mean((2, 3))), "features": y}


@kind(images())
class ReturnsOrderedDictOfLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2, padding=1)])

    def forward(self, x: Any) -> Any:
        levels = []
        for stage in self.stages:
            x = stage(x).relu()
            levels.append(x)
        return OrderedDict(levels=levels, last=levels[-1].mean((2, 3)))


@kind(images())
class MaxPoolWithIndices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.pool = nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2, return_indices=True)
        self.unpool, self.up = nn.MaxUnpool2d(2), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Any) -> Any:
        y, indices = self.pool(self.down(x))
        return self.up(self.unpool(y, indices))


@kind(rows())
class TopkOfScores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 4), nn.ModuleList([nn.Linear(6, 3) for _ in range(4)])

    def forward(self, x: Any) -> Any:
        values, indices = self.gate(x).topk(2, dim=1)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        chosen = outputs.gather(1, indices[:, :, None].expand(-1, -1, 3))
        return (values.softmax(1)[:, :, None] * chosen).sum(1)


@kind(rows())
class SortedFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        found = self.body(x).sort(dim=1)
        return self.head(found.values)


@kind(rows())
class UnboundAndSplit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 9), nn.Linear(3, 2)

    def forward(self, x: Any) -> Any:
        a, b, c = self.body(x).view(x.shape[0], 3, 3).unbind(1)
        d, e = torch.split(x, [2, 4], dim=1)
        return self.head(a * b + c) + d + e[:, :2]


@kind(images())
class VarAndMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 5, 3), nn.Linear(10, 2)

    def forward(self, x: Any) -> Any:
        var, mean = torch.var_mean(self.body(x), dim=(2, 3))
        return self.head(torch.cat((mean, var), 1))


@kind(images(4))
class AdaptivePoolWithIndices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(4, 6, 3, padding=1), nn.Linear(24, 2)

    def forward(self, x: Any) -> Any:
        y, _ = F.adaptive_max_pool2d(self.body(x), 2, return_indices=True)
        return self.head(y.flatten(1))


_Found = namedtuple("_Found", ["value", "extra"])


class _NamedInner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Any) -> Any:
        y = self.conv(x)
        return _Found(y.relu(), y.mean())


@kind(images())
class NamedTupleInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = _NamedInner(), nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return self.head(self.inner(x).value.mean((2, 3)))


@kind(rows())
class PacksOptionalNone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)

    def forward(self, x: Any, mask: Any = None) -> Any:
        y = self.body(x)
        return {"logits": y, "loss": None, "mask": mask}
