"""Successive halving: literal tables."""

from __future__ import annotations

from collections import Counter

import pytest

from evener.records.errors import InvalidValue
from evener.search.halving import bracket_of, rungs, rungs_of, survives


@pytest.mark.parametrize(
    ("epochs", "expected"), [(1, (1,)), (2, (1, 2)), (8, (1, 3, 8)), (27, (1, 3, 9, 27)), (30, (1, 2, 4, 10, 30))]
)
def test_rungs_divide_epochs_by_three(epochs: int, expected: tuple[int, ...]) -> None:
    assert rungs(epochs) == expected


def test_zero_epochs_are_rejected() -> None:
    with pytest.raises(InvalidValue) as caught:
        rungs(0)
    assert caught.value.field == "--epochs"


def test_one_third_but_at_least_one_survives() -> None:
    six = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert [survives(score, six, larger_is_better=False) for score in (0.5, 1.5, 2.5)] == [True, True, False]
    assert [survives(score, six, larger_is_better=True) for score in (6.5, 5.5, 4.5)] == [True, True, False]
    assert survives(9.0, [], larger_is_better=False)
    assert not survives(9.0, [1.0], larger_is_better=False)
    assert survives(1.0, [1.0, 1.0, 1.0], larger_is_better=False)  # equals are not worse


def test_hyperband_distributes_trials_to_brackets_as_in_its_table() -> None:
    counts = Counter(bracket_of(number, 4) for number in range(286))
    assert [round(counts[b] / counts[3]) for b in range(4)] == [7, 3, 2, 1]  # 27, 12, 6, 4 in the paper's table, of 4
    assert rungs_of(0, 27, "hyperband") == (1, 3, 9, 27)
    assert {rungs_of(number, 27, "hyperband") for number in range(60)} == {(1, 3, 9, 27), (3, 9, 27), (9, 27), (27,)}
    assert rungs_of(5, 27, "none") == (27,)
