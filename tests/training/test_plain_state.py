"""States of optimisers and schedules survive as tensors and plain values."""

from __future__ import annotations

import math
from typing import Any

import torch

from evener.records.errors import TrainingFailed
from evener.training.checkpoint import flatten, plain, revived, unflatten
from support.refusals import refused


def test_tensors_of_lists_are_kept_at_their_places() -> None:
    first, second, third = (torch.full((2,), float(i)) for i in range(3))
    state: dict[int, dict[str, Any]] = {
        0: {"step": 3, "average": first, "directions": [second, None, third]},
        4: {"none": None},
    }
    tensors, values = flatten(state)
    assert tensors.keys() == {"0.average", "0.directions#0", "0.directions#2"}
    assert values == {"0.step": 3, "0.directions": [None, None, None], "4.none": None}
    assert unflatten(tensors, plain(values, "the optimiser")) == state


def test_numbers_that_are_not_finite_come_back() -> None:
    found = revived(plain({"best": math.inf, "worst": [-math.inf, 1.5], "unknown": math.nan}, "the schedule"))
    assert found["best"] == math.inf
    assert found["worst"] == [-math.inf, 1.5]
    assert math.isnan(found["unknown"])


def test_what_is_no_plain_value_is_told() -> None:
    with refused(TrainingFailed):
        plain({"state": torch.zeros(2)}, "the optimiser")
