"""Losses: one number for a batch, or one for each sample."""

from __future__ import annotations

from math import prod

from evener.autodiff.errors import require
from evener.autodiff.tensors import Tensor, apply


def nll_loss(log_probabilities: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """-log_probabilities[n, target[n]]: negative log likelihood of the right classes.

    Args:
        log_probabilities: [N, K] or [N, K, d1, ...].
        target: classes from 0 to K - 1, [N] or [N, d1, ...].
        reduction: "mean", "sum", or "none" for each sample's.

    Raises:
        InvalidOperation: shapes do not go together, or a class is outside 0..K-1.
    """
    scores, classes = log_probabilities.shape, target.shape
    fits = len(scores) >= 2 and classes == (scores[0], *scores[2:]) and target.dtype.kind in "iu"
    require(fits, "scores of shape {} need integer classes of that shape without dimension 1, got {} of {}",
            scores, target.dtype, classes)  # fmt: skip
    if len(scores) > 2:
        rows = log_probabilities.permute(0, *range(2, len(scores)), 1).reshape(-1, scores[1])
        return nll_loss(rows, target.reshape(-1), reduction).reshape(classes if reduction == "none" else ())
    return apply("nll", (log_probabilities,), target._usable(), _share(reduction, scores[0]))


def cross_entropy(logits: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Negative log likelihood of softmax(logits) along dimension 1; arguments as for `nll_loss`."""
    return nll_loss(logits.log_softmax(1), target, reduction)


def mse_loss(x: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """(x - target)^2.

    Args:
        x: of any shape.
        target: of the same shape.
        reduction: "mean", "sum", or "none" for each element's.

    Raises:
        InvalidOperation: the shapes differ.
    """
    require(x.shape == target.shape, "mse_loss needs equal shapes, got {} and {}", x.shape, target.shape)
    return x._with("mse", target, _share(reduction, prod(x.shape)))


def _share(reduction: str, count: int) -> float | None:
    """What the sum over `count` losses is multiplied with; None where they are not summed."""
    require(reduction in ("mean", "sum", "none"), "reduction must be 'mean', 'sum' or 'none', got {!r}", reduction)
    if reduction == "none":
        return None
    return 1.0 if reduction == "sum" else 1 / count if count else float("nan")
