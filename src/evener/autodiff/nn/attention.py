"""Attention in several heads at once, with PyTorch's parameters."""

from __future__ import annotations

from evener.autodiff import functional as F
from evener.autodiff.errors import require
from evener.autodiff.functional.attention import attention_weights
from evener.autodiff.nn import init
from evener.autodiff.nn.linear import Linear
from evener.autodiff.nn.module import Module
from evener.autodiff.parameters import Parameter
from evener.autodiff.tensors import Tensor, zeros


class MultiheadAttention(Module):
    """Vaswani et al. 2017, section 3.2.2: queries, keys and values projected, attended to by head, and projected back.

    Args:
        embed_dim: E, of queries, keys, values and the result.
        num_heads: must divide E.
        dropout: probability with which a weight is dropped in training.
        batch_first: inputs are [N, L, E] instead of [L, N, E].
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, batch_first: bool = False) -> None:
        super().__init__()
        require(embed_dim % num_heads == 0, "num_heads must divide embed_dim {}, got {}", embed_dim, num_heads)
        self.num_heads, self.dropout, self.batch_first = num_heads, dropout, batch_first
        self.in_proj_weight = Parameter(zeros(3 * embed_dim, embed_dim))
        self.in_proj_bias = Parameter(zeros(3 * embed_dim))
        self.out_proj = Linear(embed_dim, embed_dim)
        init.xavier_uniform_(self.in_proj_weight)
        init.constant_(self.out_proj.bias, 0.0)  # type: ignore[arg-type]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = True, attn_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The result, shaped as `query`, and the weights' mean over heads [N, L, S] if `need_weights`.

        Args:
            query: [L, N, E], or [N, L, E] if batch_first.
            key: [S, N, E] or [N, S, E].
            value: as `key`.
            need_weights: return the weights too.
            attn_mask: [L, S] or broadcasting to [N, heads, L, S]: numbers to add, or truth values, true where a query
                may NOT look (as PyTorch has it here, and the other way round in scaled_dot_product_attention).
        """
        q, k, v = (self._heads(x, part) for part, x in enumerate((query, key, value)))
        if attn_mask is not None and attn_mask.dtype == bool:
            attn_mask = attn_mask == False  # noqa: E712  elementwise
        weights = attention_weights(q, k, attn_mask, self.dropout if self.training else 0.0, False, None)
        heads = weights.matmul(v)  # [N, heads, L, E / heads]
        joined = heads.transpose(1, 2).flatten(2)
        result = self.out_proj(joined if self.batch_first else joined.transpose(0, 1))
        return result, weights.mean(1) if need_weights else None

    def _heads(self, x: Tensor, part: int) -> Tensor:
        """Input number `part` projected, [N, heads, L, E / heads]."""
        size = self.in_proj_weight.shape[1]
        rows = slice(part * size, (part + 1) * size)
        projected = F.linear(x, self.in_proj_weight[rows], self.in_proj_bias[rows])
        samples_first = projected if self.batch_first else projected.transpose(0, 1)
        n, length, _ = samples_first.shape
        return samples_first.reshape(n, length, self.num_heads, -1).transpose(1, 2)

    def extra_repr(self) -> str:
        """Sizes."""
        return f"{self.in_proj_weight.shape[1]}, {self.num_heads}"
