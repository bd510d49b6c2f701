"""Attention: every query takes a weighted mean of the values, with weights by how well its key fits."""

from __future__ import annotations

from math import inf, sqrt

import numpy as np

from evener.autodiff.errors import require
from evener.autodiff.functional.activations import dropout
from evener.autodiff.tensors import Tensor, where


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(query key^T * scale + mask) value; Vaswani et al. 2017, equation 1.

    Args:
        query: [..., L, E].
        key: [..., S, E].
        value: [..., S, V].
        attn_mask: [..., L, S]: truth values (true where a query may look), or numbers to add.
        dropout_p: probability with which a weight is dropped.
        is_causal: query i sees keys up to i only; instead of `attn_mask`.
        scale: 1 / sqrt(E) unless given.
    """
    return attention_weights(query, key, attn_mask, dropout_p, is_causal, scale).matmul(value)


def attention_weights(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    """How much each query takes of each value, [..., L, S]; arguments as for `scaled_dot_product_attention`."""
    require(not (is_causal and attn_mask is not None), "give either attn_mask or is_causal, not both")
    if is_causal:
        attn_mask = query._made(query._lease.backend.from_numpy(np.tri(query.shape[-2], key.shape[-2], dtype=bool)))
    scores = (query * (1 / sqrt(query.shape[-1]) if scale is None else scale)).matmul(key.mT)
    if attn_mask is not None:
        scores = _masked(scores, attn_mask)
    return dropout(scores.softmax(-1), dropout_p)


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    return where(mask, scores, scores._number(-inf)) if mask.dtype == bool else scores + mask
