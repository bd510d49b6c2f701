"""A batch that a program draws by hand has as many samples in all of its tensors, and at least one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evener.frontends.programs.batch_parts import rows_of
from evener.records.errors import InvalidInput
from support.refusals import refused


@pytest.mark.parametrize("batch", [[], {"x": 3}, torch.ones(0, 4), [torch.ones(2), torch.ones(3)]], ids=str)
def test_batches_without_samples_or_with_unequal_sizes_are_refused(batch: Any) -> None:
    with refused(InvalidInput):
        rows_of(batch, 0)


def test_samples_are_counted_along_the_sample_dimension() -> None:
    assert rows_of([torch.ones(3, 2), {"y": torch.ones(4, 2)}], 1) == 2
