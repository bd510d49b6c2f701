"""The self-check finds every kind of defect before the first step; without the defect it finds nothing."""

from __future__ import annotations

import pytest

from exact.plants import PLANTS
from exact.verdicts import BY_CHECK, judge
from exact.worlds import worlds


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTS)
def test_planted_defect_is_detected_before_the_first_step(name: str) -> None:
    plant = PLANTS[name]
    with worlds() as made:
        (sound,) = judge(made, plant.recipe, [plant.way])
        (defect,) = judge(made, plant.recipe, [plant.way], plant=name)
    assert sound.verdict in ("equal", "documented", "refused by name"), sound.symptom
    assert defect.verdict == BY_CHECK, f"{defect.verdict}: {defect.symptom}"


def test_self_check_detects_statistics_of_one_rank() -> None:
    with worlds() as made:
        (found,) = judge(made, "norms/batch_norm", ["data 7,2,1"], plant="statistics of one rank")
        (unchecked,) = judge(made, "norms/batch_norm", ["data 7,2,1"], is_checked=False, plant="statistics of one rank")
    assert (found.verdict, unchecked.verdict) == (BY_CHECK, "different")
