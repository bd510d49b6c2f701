"""The learning-rate schedule: up, down, and no error after its end."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evener.data.tasks.parts import one_cycle
from evener.data.tasks.thin import share_of_peak


def test_nine_steps_rise_for_a_fifth_and_fall_along_half_a_cosine() -> None:
    shares = [share_of_peak(step, 9) for step in range(9)]
    assert shares == pytest.approx([0.5, 1, 0.9619, 0.8536, 0.6913, 0.5, 0.3087, 0.1464, 0.0381], abs=1e-4)


@given(steps=st.integers(1, 300))
def test_rate_is_positive_and_falls_after_its_peak(steps: int) -> None:
    shares = [share_of_peak(step, steps) for step in range(steps)]
    assert all(0 < share <= 1 for share in shares)
    top = shares.index(max(shares))
    assert shares == sorted(shares[: top + 1]) + sorted(shares[top + 1 :], reverse=True)
    assert (top + 1) / (steps + 1) <= 0.5


def test_optimizer_receives_the_rate_and_holds_the_last_value() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = one_cycle(optimizer, 4)
    rates = []
    for _ in range(7):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([2 * share_of_peak(step, 4) for step in (0, 1, 2, 3, 3, 3, 3)])
    assert rates[0] > rates[3] > 0
