"""Losses of other weights than one a sample are told from means over samples, wherever a batch would be cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from evener.training.draws import SameDraws
from evener.training.loss_parts import off_again, off_in_parts, off_over_data, spread

SCORES = torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TOKENS = torch.tensor([[0, 1, 2, 3, 1], [1, 1, 0, 2, 3]] * 4)
"""Every sample has one that is padded: cut anywhere, the weights are those of samples."""


def _tokens(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=0)


def _off(loss: Any, outputs: Any, targets: Tensor) -> float:
    fewer = outputs[:-1] if isinstance(outputs, Tensor) else tuple(one[:-1] for one in outputs)
    return off_in_parts(loss, outputs, targets, fewer)


@pytest.mark.parametrize(
    "loss", [_tokens, lambda y, t: y.square().mean(), lambda y, t: y.sum((1, 2)).sigmoid().mean() + t.double().mean()]
)
def test_mean_over_samples_is_equal_in_parts(loss: Any) -> None:
    assert _off(loss, SCORES, TOKENS) < 1e-12


def test_padding_that_equal_halves_hide_is_detected() -> None:
    targets = TOKENS.clone()
    targets[1], targets[5] = 0, 0  # both halves have as many
    halves = [_tokens(SCORES[a : a + 4], targets[a : a + 4]) for a in (0, 4)]
    assert float(_tokens(SCORES, targets)) == pytest.approx(float(torch.stack(halves).mean()))
    assert _off(_tokens, SCORES, targets) > 1e-3


@pytest.mark.parametrize("loss", [lambda y, t: y.sum(), lambda y, t: (y[:, 0] @ y[:, 0].t()).logsumexp(1).mean()])
def test_sums_and_losses_between_samples_are_detected(loss: Any) -> None:
    assert _off(loss, SCORES, TOKENS) > 1e-3


def test_outputs_without_one_row_per_sample_are_not_judged() -> None:
    rows, total = SCORES[:, 0], SCORES.sum()
    assert off_in_parts(lambda y, t: y[1], (rows, total), TOKENS, (rows[:-1], total)) == 0.0
    assert _off(lambda y, t: y[0].mean() * y[1].mean(), (rows, rows), torch.zeros(7)) == 0.0


def test_padding_late_in_the_data_is_detected() -> None:
    late = torch.tensor([[1, 2, 3, 1, 2]] * 6 + [[1, 0, 0, 0, 0]] * 4)
    first, outputs = late[:4], SCORES[:4]
    assert _off(_tokens, outputs, first) < 1e-12
    assert off_over_data(_tokens, outputs, first, outputs[:-1], late[spread(len(late))]) > 1e-3
    assert off_over_data(lambda y, t: y.mean(), outputs, first, outputs[:-1], late) < 1e-12
    assert off_over_data(_tokens, outputs, first, outputs[:-1], late[:, :2]) == 0.0


def test_random_mask_mean_is_detected_and_sample_noise_is_not() -> None:
    def drawing(first: int, last: int) -> Any:
        return SameDraws((first, last - first))

    def masked(y: Tensor, _: Tensor) -> Tensor:
        mask = (torch.rand(len(y), 5) < 0.4).double()
        return (y.sum(2) * mask).sum() / mask.sum()

    def noisy(y: Tensor, _: Tensor) -> Tensor:
        return (y[..., 0] + torch.rand(len(y), 5)).mean()

    assert off_in_parts(masked, SCORES, TOKENS, SCORES[:-1], drawing) > 1e-3
    assert off_in_parts(noisy, SCORES, TOKENS, SCORES[:-1], drawing) < 1e-12


def test_loss_that_counts_its_calls_differs_on_the_next_call() -> None:
    calls: list[int] = []

    def counting(y: Tensor, _: Tensor) -> Tensor:
        calls.append(0)
        return y.mean() / len(calls)

    assert off_again(counting, SCORES, TOKENS) == pytest.approx(0.5)
    assert off_again(_tokens, SCORES, TOKENS) == 0.0
