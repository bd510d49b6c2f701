"""Rules of the losses: one value for each sample, or their sum times a share (1, or 1 / number for the mean)."""

from __future__ import annotations

from typing import Any

from evener.autodiff.rules.rule import Rule


def _total(be: Any, each: Any, share: float | None) -> Any:
    if share is None:
        return each
    total = be.sum(each, tuple(range(len(each.shape))), False)
    return be.multiply(total, share, total)


def _nll(be: Any, scores: Any, index: Any, share: float | None) -> Any:
    """-scores[n, index[n]] for every row n."""
    picked = be.pick(scores, index)
    return _total(be, be.negative(picked, picked), share), (scores.shape, index, share)


def _nll_scores(be: Any, g: Any, saved: Any, _out: Any) -> Any:
    shape, index, share = saved
    return be.unpick(shape, index, be.multiply(g, -1 if share is None else -share))


def _mse(be: Any, a: Any, b: Any, share: float | None) -> Any:
    """(a - b)^2."""
    difference = be.subtract(a, b)
    return _total(be, be.multiply(difference, difference), share), (difference, share)


def _mse_operand(sign: int) -> Any:
    def vjp(be: Any, g: Any, saved: Any, _out: Any) -> Any:
        difference, share = saved
        return be.multiply(difference, be.multiply(g, 2 * sign * (1 if share is None else share)))

    return vjp


LOSSES = {"nll": Rule(_nll, (_nll_scores,)), "mse": Rule(_mse, (_mse_operand(1), _mse_operand(-1)))}
