"""States of optimisers and schedules survive as tensors and plain values."""

from __future__ import annotations

import math
from typing import Any

import torch

from evener.records.errors import TrainingFailed
from evener.training.checkpoint import flatten, plain, revived, unflatten
from support.refusals import refused


def test_tensors_in_lists_are_restored_at_their_positions() -> None:
    first, second, third = (torch.full((2,), float(i)) for i in range(3))
    state: dict[int, dict[str, Any]] = {
        0: {"step": 3, "average": first, "directions": [second, None, third]},
        4: {"none": None},
    }
    tensors, values = flatten(state)
    assert tensors.keys() == {"0.average", "0.directions#0", "0.directions#2"}
    assert values == {"0.step": 3, "0.directions": [None, None, None], "4.none": None}
    assert unflatten(tensors, plain(values, "the optimiser")) == state


def test_non_finite_numbers_are_restored() -> None:
    found = revived(plain({"best": math.inf, "worst": [-math.inf, 1.5], "unknown": math.nan}, "the schedule"))
    assert found["best"] == math.inf
    assert found["worst"] == [-math.inf, 1.5]
    assert math.isnan(found["unknown"])


def test_state_that_is_not_plain_is_refused() -> None:
    with refused(TrainingFailed):
        plain({"state": torch.zeros(2)}, "the optimiser")
