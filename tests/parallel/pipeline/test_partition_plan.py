"""Which micro-batches are recomputed under every policy, and how many a stage then holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.oracle.schedule import SCHEDULES, Action, ScheduleName, max_held
from evener.parallel.pipeline.partition_plan import recomputed

names = st.sampled_from(list(SCHEDULES))
numbers = st.integers(min_value=1, max_value=6)


def rows(name: ScheduleName, stages: int, micro_batches: int) -> list[list[Action]]:
    return [SCHEDULES[name](stage, stages, micro_batches) for stage in range(stages)]


@pytest.mark.parametrize(
    ("name", "policy", "expected"),
    [
        ("gpipe", "always", [{0, 1, 2}, {0, 1, 2}, {0, 1, 2}]),
        ("gpipe", "except_last", [{0, 1}, {0, 1}, {0, 1}]),
        ("1f1b", "except_last", [{0, 1, 2}, {0, 1, 2}, set()]),
        ("1f1b", "never", [set(), set(), set()]),
    ],
)
def test_literal_policies(name: ScheduleName, policy: str, expected: list[set[int]]) -> None:
    found = [recomputed(policy, actions, 0) for actions in rows(name, 3, 3)]  # type: ignore[arg-type]
    assert [set(again) for again in found] == expected


@given(names, numbers, numbers, st.integers(min_value=1, max_value=9))
def test_auto_fits_memory_with_the_fewest_recomputed_micro_batches(
    name: ScheduleName, stages: int, micro_batches: int, most_kept: int
) -> None:
    for actions in rows(name, stages, micro_batches):
        again = recomputed("auto", actions, most_kept)
        assert max_held(actions, again) <= most_kept
        if most_kept >= max_held(actions):
            assert not again
        elif name == "gpipe":
            assert len(again) == micro_batches - most_kept


@given(names, numbers, numbers)
def test_always_holds_a_single_micro_batch(name: ScheduleName, stages: int, micro_batches: int) -> None:
    for actions in rows(name, stages, micro_batches):
        assert max_held(actions, recomputed("always", actions, 0)) == 1
