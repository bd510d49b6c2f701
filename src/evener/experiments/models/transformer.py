"""A deep Transformer for translation (Vaswani et al., 2017), made to stay stable when it is very deep.

As in GPipe's 128-layer model (Huang et al., 2019, section 5): the feed-forward layers begin with weights scaled down by
the number of layers, and logits are clipped beyond a bound. Layers normalise their inputs, not their outputs.

N samples, S tokens of a source, T tokens of a target, D dim.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.records.errors import require

PADDING = 0
"""The token that stands for padding."""


class Attention(nn.Module):
    """Scaled dot-product attention of several heads: queries [N, T, D], keys and values [N, S, D] -> [N, T, D]."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        """Attend from `x` to `memory` where `mask` (broadcast to [N, heads, T, S]) is true; causally without one."""
        query, key, value = (
            layer(y).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer, y in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=mask is None)
        outputs: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return outputs


class FeedForward(nn.Module):
    """Two linear layers with a ReLU between them; initial weights are divided by `scale`."""

    def __init__(self, dim: int, hidden: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.inner, self.outer = _Scaled(dim, hidden, scale), _Scaled(hidden, dim, scale)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, T, D] to [N, T, D]."""
        outputs: Tensor = self.outer(torch.relu(self.inner(x)))
        return outputs


class _Scaled(nn.Linear):
    """A linear layer whose initial weights are divided by `scale`."""

    def __init__(self, inputs: int, outputs: int, scale: float) -> None:
        self.scale = scale
        super().__init__(inputs, outputs)

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        with torch.no_grad():
            self.weight.div_(self.scale)
        nn.init.zeros_(self.bias)


class TransformerLayer(nn.Module):
    """A layer of the encoder, or, with `attends_to_memory`, of the decoder."""

    def __init__(
        self, dim: int, heads: int, hidden: int, dropout: float, scale: float, attends_to_memory: bool
    ) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(dim), Attention(dim, heads, dropout)
        if attends_to_memory:
            self.memory_norm, self.memory_attention = nn.LayerNorm(dim), Attention(dim, heads, dropout)
        self.feed_norm, self.feed = nn.LayerNorm(dim), FeedForward(dim, hidden, scale)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, mask: Tensor | None, memory: Tensor | None = None, seen: Tensor | None = None
    ) -> Tensor:
        """Map [N, T, D] to [N, T, D]; attend to itself by `mask`, then to `memory` where `seen`."""
        y = self.norm(x)
        x = x + self.dropout(self.attention(y, y, mask))
        if memory is not None:
            x = x + self.dropout(self.memory_attention(self.memory_norm(x), memory, seen))
        outputs: Tensor = x + self.dropout(self.feed(self.feed_norm(x)))
        return outputs


class Transformer(nn.Module):
    """Source tokens [N, S], target tokens [N, T] -> logits [N, T, vocabulary] of every target token's successor.

    Args:
        vocabulary: number of tokens; 0 is padding.
        layers: number of layers of the encoder, and of the decoder.
        dim: D.
        heads: number of heads of every attention.
        hidden: width of the feed-forward layers.
        dropout: fraction of values that are dropped in training.
        clip: bound of the logits' magnitude.
        tied: whether the embedding of both languages and the last layer share one weight.
    """

    def __init__(
        self,
        vocabulary: int = 32000,
        layers: int = 6,
        dim: int = 512,
        heads: int = 8,
        hidden: int = 2048,
        dropout: float = 0.1,
        clip: float = 30.0,
        tied: bool = True,
    ) -> None:
        require(dim % heads == 0 and dim % 2 == 0, "dim", dim, f"an even multiple of heads ({heads})")
        super().__init__()
        self.clip, self.dim = clip, dim
        self.embedding = _Embedding(vocabulary, dim)
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.ModuleList(
            TransformerLayer(dim, heads, hidden, dropout, layers, False) for _ in range(layers)
        )
        self.encoder_norm = nn.LayerNorm(dim)
        self.decoder = nn.ModuleList(TransformerLayer(dim, heads, hidden, dropout, layers, True) for _ in range(layers))
        self.decoder_norm = nn.LayerNorm(dim)
        self.classify = nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.classify.weight = self.embedding.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return logits; a target token attends to itself and to earlier ones."""
        seen = (source != PADDING)[:, None, None, :]
        memory = self._embed(source)
        for layer in self.encoder:
            memory = layer(memory, seen)
        memory, x = self.encoder_norm(memory), self._embed(target)
        for layer in self.decoder:
            x = layer(x, None, memory, seen)
        logits: Tensor = self.classify(self.decoder_norm(x))
        return logits.clamp(-self.clip, self.clip)

    def _embed(self, tokens: Tensor) -> Tensor:
        vectors = self.embedding(tokens) * math.sqrt(self.dim)
        outputs: Tensor = self.dropout(vectors + positions(tokens.shape[1], self.dim, vectors))
        return outputs


class _Embedding(nn.Embedding):
    """An embedding with vectors of about unit length."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)


def positions(length: int, dim: int, like: Tensor) -> Tensor:
    """Return sines and cosines of every position, [length, dim], with the dtype and device of `like`."""
    steps = torch.arange(length, device=like.device, dtype=like.dtype)[:, None]
    waves = torch.exp(torch.arange(0, dim, 2, device=like.device, dtype=like.dtype) * (-math.log(1e4) / dim))
    return torch.cat((torch.sin(steps * waves), torch.cos(steps * waves)), dim=1)


def translation_loss(logits: Tensor, successors: Tensor, smoothing: float = 0.1) -> Tensor:
    """Return the mean cross-entropy over the tokens of `successors` [N, T] that are not padding; zero without any."""
    total = F.cross_entropy(
        logits.flatten(0, 1), successors.flatten(), ignore_index=PADDING, label_smoothing=smoothing, reduction="sum"
    )
    return total / tokens_in(successors).clamp(min=1)


def tokens_in(successors: Tensor) -> Tensor:
    """Return the number of tokens that are not padding, over which `translation_loss` is a mean."""
    return (successors != PADDING).sum()
