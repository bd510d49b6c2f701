"""Whatever the order of messages, whoever comes, dies, repeats itself or talks nonsense: the server keeps its word.

Every contribution adds 1 to the counter of its lease. So the final counters tell which contributions went into the
weights, and how often.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.agreements.settings import AgreementSettings
from support.server_hall import CASES, EPOCHS, SAMPLES, SECONDS, Hall

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["join", "push", "push", "push", "push", "die", "again", "connect", "nan", "short", "parts", "skip"]
        ),
        st.sampled_from("abc"),
    ),
    max_size=60,
)


def play(agreement: AgreementSettings, actions: list[tuple[str, str]]) -> Hall:
    hall = Hall(agreement)
    for action, name in actions:
        hall.act(action, name)
    hall.finish()
    return hall


@pytest.mark.parametrize("name", CASES)
@given(actions=ACTIONS)
@settings(max_examples=60, deadline=None)
def test_every_sample_of_every_epoch_is_used_exactly_once(name: str, actions: list[tuple[str, str]]) -> None:
    hall = play(CASES[name], actions)
    assert hall.used() == {(epoch, p): 1 for epoch in range(EPOCHS) for p in range(SAMPLES)}
    assert hall.versions == list(range(1, len(hall.versions) + 1))
    assert np.isfinite(hall.server.weights.parameters[0]).all()


@pytest.mark.parametrize("name", CASES)
@given(actions=ACTIONS)
@settings(max_examples=25, deadline=None)
def test_totals_add_up(name: str, actions: list[tuple[str, str]]) -> None:
    hall = play(CASES[name], actions)
    tallies = [worker.totals for worker in hall.server.workers.values()]
    assert sum(t.num_samples + t.samples_refused for t in tallies) == SAMPLES * EPOCHS
    assert sum(t.applied for t in tallies) == hall.server.weights.counters.sum()
    assert sum(t.refused for t in tallies) == len(hall.refused)
    repeats = sum(action == "again" and name in SECONDS for action, name in actions)
    assert sum(t.duplicate + t.late for t in tallies) <= repeats
