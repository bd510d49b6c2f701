"""What a search learns of its trials' times."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from evener.launch.nodes import parse_local_nodes
from evener.search.assignments import Assignments
from evener.search.placement import REGROUP_SECONDS
from evener.search.trials import SearchTrial


def assignments_after(ends: Sequence[float], nodes: str = "1") -> Assignments:
    """After a trial whose epochs ended at these seconds."""
    found, trial = Assignments(epochs=9, batch_size=4), SearchTrial(0, {})
    specs = parse_local_nodes(nodes)
    found.update_nodes(specs)
    found.begin(trial, [spec.name for spec in specs], 0.0)
    for epoch, end in enumerate(ends, start=1):
        found.epoch_ended(0, 5, end)
        trial.scores[epoch] = 0.5
    return found


def test_start_of_a_trial_is_learned_from_its_first_two_epochs() -> None:
    assert assignments_after([12.0]).regroup_seconds == REGROUP_SECONDS
    assert assignments_after([12.0, 14.0]).regroup_seconds == pytest.approx(10.0)
    assert assignments_after([12.0, 14.0, 15.0]).regroup_seconds == pytest.approx(10.0)


def test_start_that_takes_no_time_is_no_reason_to_move_trials_more_often() -> None:
    assert assignments_after([2.0, 4.0]).regroup_seconds == REGROUP_SECONDS


def test_start_of_several_nodes_is_not_learned_from() -> None:
    assert assignments_after([12.0, 14.0], nodes="1,0.5").regroup_seconds == REGROUP_SECONDS
