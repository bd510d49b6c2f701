"""Losses: of classes, of tokens, of images, of weights, and some that are no mean over samples."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from exact.recipe import Kind, classes, images, rows, tokens

kind = Kind(__name__)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def _convnet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))


def _of_tokens() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11))


_WEIGHT = torch.tensor([1.0, 0.5, 2.0, 1.0, 3.0], dtype=torch.float64)

for _name, _loss in {
    "cross_entropy": F.cross_entropy,
    "label_smoothing": lambda y, t: F.cross_entropy(y, t, label_smoothing=0.1),
    "focal": lambda y, t: (
        (1 - y.softmax(1).gather(1, t[:, None])[:, 0]) ** 2 * F.cross_entropy(y, t, reduction="none")
    ).mean(),
    "multi_margin": F.multi_margin_loss,
    "mean_by_hand": lambda y, t: F.cross_entropy(y, t, reduction="sum") / len(t),
}.items():
    kind.add(f"{_name}_of_rows", _mlp, rows(), targets=classes(), loss=_loss)
    kind.add(f"{_name}_of_images", _convnet, images(), targets=classes(), loss=_loss)

for _name, _loss in {
    "class_weights": lambda y, t: F.cross_entropy(y, t, weight=_WEIGHT),
    "summed": lambda y, t: F.cross_entropy(y, t, reduction="sum"),
    "ignored_class": lambda y, t: F.cross_entropy(y, t, ignore_index=0),
    "contrastive": lambda y, t: F.cross_entropy(y @ y.t(), torch.arange(len(t))),
    "hardest_half": lambda y, t: F.cross_entropy(y, t, reduction="none").topk(max(1, len(t) // 2)).values.mean(),
    "variance_of_batch": lambda y, t: F.cross_entropy(y, t) + 0.1 * y.var(0, correction=0).mean(),
}.items():
    kind.add(f"no_mean_{_name}", _mlp, rows(), targets=classes(), loss=_loss)


@kind(
    tokens(),
    targets=tokens(),
    loss=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
)
def next_tokens() -> nn.Module:
    return _of_tokens()


kind.add(
    "no_mean_padded_tokens",
    _of_tokens,
    tokens(),
    targets=tokens(),
    loss=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), ignore_index=0),
)


@kind(images(), targets=images(), loss=lambda y, t: F.mse_loss(y, t) + 0.1 * F.l1_loss(y, t))
def reconstruction() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 3, 3, padding=1))


@kind(images(), targets=images(), loss=lambda y, t: F.smooth_l1_loss(y.diff(dim=2), t.diff(dim=2)))
def gradient_difference() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 3, 3, padding=1))


def _gaussian(outputs: Any, targets: Any) -> Any:
    mean, scale = outputs.chunk(2, 1)
    return F.gaussian_nll_loss(mean, targets, F.softplus(scale) + 0.1)


@kind(rows(), targets=rows(2), loss=_gaussian)
def gaussian() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


class _WithPenalty(nn.Module):
    """A model that returns its loss's second part, a penalty on its weights, beside its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x).tanh()), self.body.weight.square().mean()


kind.add(
    "penalty_on_weights",
    _WithPenalty,
    rows(),
    targets=classes(),
    loss=lambda out, t: F.cross_entropy(out[0], t) + 0.1 * out[1],
)


class _LossInside(nn.Module):
    """As many models of Transformers: the loss is computed by the model, a mean over its own samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Any, labels: Any) -> Any:
        logits = self.head(self.body(x).tanh())
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


kind.add(
    "loss_inside",
    _LossInside,
    lambda g, n: (rows()(g, n), classes()(g, n)),
    loss=lambda out, _: out["loss"],
    across=True,
)


class _RouterBalance(nn.Module):
    """A mixture of experts with a balance of the whole batch in its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 3), nn.ModuleList([nn.Linear(6, 5) for _ in range(3)])

    def forward(self, x: Any) -> Any:
        weight = self.gate(x).softmax(1)
        outputs = sum(weight[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return outputs, weight.mean(0).square().sum()


kind.add(
    "no_mean_router_balance",
    _RouterBalance,
    rows(),
    targets=classes(),
    loss=lambda out, t: F.cross_entropy(out[0], t) + 0.1 * out[1],
)
