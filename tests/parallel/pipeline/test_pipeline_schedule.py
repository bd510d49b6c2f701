"""Schedules as tables: what they hold, how long they take, how much they idle."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.parallel.pipeline import schedule
from evener.parallel.pipeline.rematerialise import POLICIES, most_held, most_waiting, recomputed
from evener.parallel.pipeline.schedule import SCHEDULES, Action, ScheduleName, bubble, with_recomputing

names = st.sampled_from(list(SCHEDULES))
numbers = st.integers(min_value=1, max_value=6)


def rows(name: ScheduleName, stages: int, micro_batches: int) -> list[list[Action]]:
    return [SCHEDULES[name](stage, stages, micro_batches) for stage in range(stages)]


def simulate(table: list[list[Action]]) -> list[dict[Action, int]]:
    """When each stage performs its actions, if every one takes a unit of time; fails if they wait for each other."""
    done: list[dict[Action, int]] = [{} for _ in table]
    now = 0
    while any(len(done[k]) < len(actions) for k, actions in enumerate(table)):
        ready = []
        for k, actions in enumerate(table):
            if len(done[k]) == len(actions):
                continue
            action = actions[len(done[k])]
            other = {"forward": k - 1, "backward": k + 1}.get(action.kind, -1)
            needed = done[other].get(action, now) if 0 <= other < len(table) else -1
            if needed < now:
                ready.append((k, action))
        assert ready or now == 0, f"all wait: {table}"
        for k, action in ready:
            done[k][action] = now
        now += 1
    return done


def drawing(name: ScheduleName) -> list[str]:
    found = []
    for times in simulate(rows(name, 4, 3)):
        letters = {t: "abc"[a.micro_batch] if a.kind == "backward" else str(a.micro_batch) for a, t in times.items()}
        found.append(" ".join(letters.get(t, ".") for t in range(12)))
    return found


@pytest.mark.parametrize(("name", "column"), [("gpipe", 0), ("1f1b", 1)])
def test_the_drawing_in_the_docstring_is_what_happens(name: ScheduleName, column: int) -> None:
    assert schedule.__doc__ is not None
    drawn = [
        re.split(r"\s*stage \d  ", line)[1:]
        for line in schedule.__doc__.splitlines()
        if "stage 0  " in line or re.match(r"\s+stage [123]  ", line)
    ]
    assert [row[column].strip() for row in drawn] == [line.strip() for line in drawing(name)]


@given(names, numbers, numbers)
def test_every_micro_batch_passes_once_and_the_idle_share_is_that_of_gpipe(
    name: ScheduleName, stages: int, micro_batches: int
) -> None:
    table = rows(name, stages, micro_batches)
    for actions in table:
        expected = {Action(k, i) for k in ("forward", "backward") for i in range(micro_batches)}
        assert sorted(actions) == sorted(expected)
    done = simulate(table)
    length = max(max(times.values()) for times in done) + 1
    assert length == 2 * (micro_batches + stages - 1)
    assert 1 - 2 * micro_batches / length == pytest.approx(bubble(stages, micro_batches))


@given(numbers, numbers)
def test_gpipe_holds_all_micro_batches_1f1b_no_more_than_stages_behind(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        assert most_waiting(SCHEDULES["gpipe"](stage, stages, micro_batches)) == micro_batches
        assert most_waiting(SCHEDULES["1f1b"](stage, stages, micro_batches)) == min(micro_batches, stages - stage)


@given(names, numbers, numbers, st.sampled_from(POLICIES), st.integers(min_value=0, max_value=9))
def test_recomputing_adds_no_waiting_and_comes_right_before_backward(
    name: ScheduleName, stages: int, micro_batches: int, policy: str, most_kept: int
) -> None:
    table = []
    for actions in rows(name, stages, micro_batches):
        again = recomputed(policy, actions, most_kept)  # type: ignore[arg-type]
        full = with_recomputing(actions, again)
        assert [action for action in full if action.kind != "recompute"] == actions
        for i, action in enumerate(full):
            if action.kind == "recompute":
                assert full[i + 1] == Action("backward", action.micro_batch)
        table.append(full)
    simulate(table)


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
def test_auto_fits_and_recomputes_no_more_than_it_has_to(
    name: ScheduleName, stages: int, micro_batches: int, most_kept: int
) -> None:
    for actions in rows(name, stages, micro_batches):
        again = recomputed("auto", actions, most_kept)
        assert most_held(actions, again) <= most_kept
        if most_kept >= most_waiting(actions):
            assert not again
        elif name == "gpipe":
            assert len(again) == micro_batches - most_kept


@given(names, numbers, numbers)
def test_always_holds_a_single_micro_batch(name: ScheduleName, stages: int, micro_batches: int) -> None:
    for actions in rows(name, stages, micro_batches):
        assert most_held(actions, recomputed("always", actions, 0)) == 1
