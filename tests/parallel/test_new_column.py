"""A new column of the table needs no other code: it is planned, performed and counted (docs/adding-a-strategy.md)."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from evener.oracle.division import rules
from evener.oracle.division.layout import Replica
from evener.oracle.division.plan import Arrangement
from evener.oracle.division.rules import TABLE
from support.compare_divided import close, gradient_of_inputs, hold_against, serial
from support.thread_ranks import together

LAZY: Any = "lazy"
COLUMN = {**TABLE["sharded"], "convolution": rules.by_filter, "linear": rules.by_filter}


@pytest.mark.parametrize("name", ["residual", "unet"])
def test_new_column_keeps_values_divided_and_equals_serial(name: str) -> None:
    arrangement = Arrangement(division=LAZY, replicas=(Replica(shares=(3, 1, 2)),))
    expected = serial(name)
    samples = [len(expected.inputs[0])]
    with mock.patch.dict(TABLE, {LAZY: COLUMN}):
        parts = together(3, lambda group: hold_against(group, expected, arrangement, samples))
    close(gradient_of_inputs(parts, arrangement), expected.input_grads, "gradient of the inputs")
