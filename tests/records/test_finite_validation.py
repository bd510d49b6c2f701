"""Validations hold finite numbers only, so that every record can be read again."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import msgspec
import pytest

from evener.records.errors import NonFiniteLoss
from evener.records.record import Validation, finite_validation
from support.refusals import refused

FIELDS: dict[str, Any] = {"step": 3, "epoch": 0, "loss": 0.5, "accuracy": 0.5, "seconds": 1.0}


@pytest.mark.parametrize("loss", [nan, inf, -inf])
def test_non_finite_loss_is_refused(loss: float) -> None:
    with refused(NonFiniteLoss):
        finite_validation("a", **{**FIELDS, "loss": loss})


@pytest.mark.parametrize("wrong", [nan, inf, -inf])
def test_non_finite_metrics_are_left_out(wrong: float) -> None:
    validation = finite_validation("a", **{**FIELDS, "accuracy": wrong}, metrics={"mAP": wrong, "F1": 0.25})
    assert (validation.accuracy, validation.metrics) == (None, {"F1": 0.25})
    assert msgspec.json.decode(msgspec.json.encode(validation), type=Validation) == validation
