"""What is seen of operations on tensors without memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from evener.tracer.meta_model import META, CostMeter


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("training", [False, True])
def test_operations_are_random_only_if_they_draw_numbers(training: bool, p: float) -> None:
    x = torch.empty(2, 3, 4, 5, device=META)

    def is_random(y: Tensor) -> bool:
        return meter.take().is_random

    meter = CostMeter([])
    with meter:
        assert is_random(F.rrelu(x, training=training)) is training
        assert is_random(F.dropout(x, 0.4, training=training)) is training
        assert is_random(F.scaled_dot_product_attention(x, x, x, dropout_p=p)) is (p > 0)
        assert is_random(torch.rand_like(x))
        assert not is_random(x.relu())
