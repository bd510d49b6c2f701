"""Schedules as tables: what they hold, how long they take, how much they idle; and steps simulated in their order."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.oracle import schedule
from evener.oracle.schedule import (
    SCHEDULES,
    Action,
    ScheduleName,
    SimulatedStep,
    bubble,
    divided_in,
    max_held,
    simulate,
    with_recomputing,
)

names = st.sampled_from(list(SCHEDULES))
of_two_passes = st.sampled_from(["gpipe", "1f1b"])
numbers = st.integers(min_value=1, max_value=6)
seconds = st.lists(st.floats(0.1, 5), min_size=1, max_size=5)


def rows(name: ScheduleName, stages: int, micro_batches: int) -> list[list[Action]]:
    return [SCHEDULES[name](stage, stages, micro_batches) for stage in range(stages)]


def play(table: list[list[Action]]) -> list[dict[Action, int]]:
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


def drawing(name: ScheduleName, micro_batches: int, backward: int) -> list[str]:
    signs = {"forward": "01234567", "backward": "abcdefgh", "weights": "ABCDEFGH"}
    step = simulate([1.0] * 4, [float(backward)] * 4, micro_batches, name)
    lines = []
    for passes in step.passes:
        line = ["."] * round(step.seconds)
        for action, start, end in passes:
            for place in range(round(start), round(end)):
                line[place] = signs[action.kind][action.micro_batch]
        lines.append(" ".join(line))
    return lines


@pytest.mark.parametrize(
    ("name", "table", "column", "micro_batches", "backward"),
    [("gpipe", 0, 0, 3, 1), ("1f1b", 0, 1, 3, 1), ("zero-bubble", 1, 0, 8, 2)],
)
def test_the_docstring_draws_the_schedule_correctly(
    name: ScheduleName, table: int, column: int, micro_batches: int, backward: int
) -> None:
    assert schedule.__doc__ is not None
    lines = [line for line in schedule.__doc__.splitlines() if re.match(r"\s+stage \d  ", line)]
    drawn = [re.split(r"\s*stage \d  ", line)[1:][column] for line in lines[4 * table : 4 * table + 4]]
    assert [row.strip() for row in drawn] == drawing(name, micro_batches, backward)


@given(of_two_passes, numbers, numbers)
def test_micro_batches_pass_once_and_idle_share_matches_gpipe(
    name: ScheduleName, stages: int, micro_batches: int
) -> None:
    table = rows(name, stages, micro_batches)
    for actions in table:
        expected = {Action(k, i) for k in ("forward", "backward") for i in range(micro_batches)}
        assert sorted(actions) == sorted(expected)
    done = play(table)
    length = max(max(times.values()) for times in done) + 1
    assert length == 2 * (micro_batches + stages - 1)
    assert 1 - 2 * micro_batches / length == pytest.approx(bubble(stages, micro_batches))


@given(numbers, numbers)
def test_gpipe_holds_all_micro_batches_and_1f1b_one_per_remaining_stage(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        assert max_held(SCHEDULES["gpipe"](stage, stages, micro_batches)) == micro_batches
        assert max_held(SCHEDULES["1f1b"](stage, stages, micro_batches)) == min(micro_batches, stages - stage)


@given(names, numbers, numbers, st.sets(st.integers(min_value=0, max_value=5)))
def test_recomputing_directly_precedes_backward_without_waiting(
    name: ScheduleName, stages: int, micro_batches: int, again: set[int]
) -> None:
    table = []
    for actions in rows(name, stages, micro_batches):
        full = with_recomputing(actions, again)
        undivided = [one for one in actions if one.kind != "weights" or one.micro_batch not in again]
        assert [action for action in full if action.kind != "recompute"] == undivided
        for i, action in enumerate(full):
            if action.kind == "recompute":
                assert full[i + 1] == Action("backward", action.micro_batch)
        assert divided_in(full).isdisjoint(again)
        table.append(full)
    play(table)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 4, 16])
def test_bubble_of_equal_stages_matches_the_published_one(name: ScheduleName, stages: int, micro_batches: int) -> None:
    step = simulate([1.0] * stages, [2.0] * stages, micro_batches, name)
    idle = 1 - sum(step.busy) / (stages * step.seconds)
    assert idle == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert idle == pytest.approx(bubble(stages, micro_batches))
    assert step.seconds == pytest.approx(3 * (micro_batches + stages - 1))


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro_batches", [8, 16, 40])
def test_zero_bubble_idles_until_the_first_micro_batch_comes(stages: int, micro_batches: int) -> None:
    step = simulate([1.0] * stages, [2.0] * stages, micro_batches, "zero-bubble")
    assert step.seconds == pytest.approx(3 * micro_batches + stages - 1)


@given(numbers, numbers)
def test_zero_bubble_passes_once_and_holds_what_it_says(stages: int, micro_batches: int) -> None:
    table = rows("zero-bubble", stages, micro_batches)
    play(table)
    for stage, actions in enumerate(table):
        for kind in ("forward", "backward"):
            assert [one.micro_batch for one in actions if one.kind == kind] == list(range(micro_batches))
        divided = [one.micro_batch for one in actions if one.kind == "weights"]
        assert divided == list(range(micro_batches))[-2 * (stages - 1) :] if stage else divided == []
        for i in divided:
            assert actions.index(Action("weights", i)) > actions.index(Action("backward", i))
        assert max_held(actions) <= 2 * stages - 1 - stage


def test_passes_of_1f1b_alternate_after_the_warm_up() -> None:
    text = " ".join(f"{kind[0].upper()}{micro}" for kind, micro in SCHEDULES["1f1b"](1, 4, 5))
    assert text == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"


def test_messages_delay_the_first_micro_batch_and_overlap_with_others() -> None:
    assert simulate([1, 1], [1, 1], 1, transfer=[0.5]).seconds == pytest.approx(5.0)
    many = simulate([1, 1], [1, 1], 50, "gpipe", transfer=[0.5])
    assert many.seconds == pytest.approx(simulate([1, 1], [1, 1], 50, "gpipe").seconds + 1.0)


def times(step: SimulatedStep, stage: int) -> dict[Action, tuple[float, float]]:
    return {action: (start, end) for action, start, end in step.passes[stage]}


@given(seconds, st.data(), numbers, names)
def test_every_pass_runs_once_and_waits_for_its_input(
    forward: list[float], data: st.DataObject, micro_batches: int, name: ScheduleName
) -> None:
    backward = data.draw(st.lists(st.floats(0.1, 5), min_size=len(forward), max_size=len(forward)))
    transfer = data.draw(st.lists(st.floats(0, 1), min_size=len(forward) - 1, max_size=len(forward) - 1))
    step = simulate(forward, backward, micro_batches, name, transfer)
    for stage in range(len(forward)):
        passes = times(step, stage)
        assert {action for action in passes if action.kind != "weights"} == {
            Action(kind, m) for kind in ("forward", "backward") for m in range(micro_batches)
        }
        for m in range(micro_batches):
            assert passes[Action("backward", m)][0] >= passes[Action("forward", m)][1] - 1e-9
            if stage:
                before = times(step, stage - 1)
                assert passes[Action("forward", m)][0] >= before[Action("forward", m)][1] + transfer[stage - 1] - 1e-9
                assert before[Action("backward", m)][0] >= passes[Action("backward", m)][1] + transfer[stage - 1] - 1e-9
    assert step.seconds >= max(step.busy) - 1e-9
