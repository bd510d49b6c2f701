"""What small parts cost: narrow convolutions, passes of tiny layers."""

import pytest
import torch

from evener.benchmark.widths import measure_pass, measure_widths
from evener.errors import InvalidValue

CPU = torch.device("cpu")


def test_efficiencies_are_fractions_of_the_best_width() -> None:
    found = measure_widths(CPU, 0.05)
    assert [one.filters for one in found] == [4, 8, 16, 32, 64, 128, 256]
    assert max(one.efficiency for one in found) == 1.0
    assert found[0].efficiency < 0.9  # four filters do not fill a vector of 8 or 16 numbers


def test_a_pass_of_a_tiny_layer_takes_microseconds() -> None:
    assert 1e-7 < measure_pass(CPU, 0.02) < 5e-3


@pytest.mark.parametrize("measure", [measure_widths, measure_pass])
def test_a_budget_has_to_be_positive(measure: object) -> None:
    assert callable(measure)
    with pytest.raises(InvalidValue, match="budget_seconds must be positive"):
        measure(CPU, 0.0)
