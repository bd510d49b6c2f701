"""Simulated pipelines: the bubble is the published one, and no pass begins before its input is there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.oracle.forecast.schedule import Order, Timeline, held, passes_of, simulate

seconds = st.lists(st.floats(0.1, 5), min_size=1, max_size=5)


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 4, 16])
def test_the_bubble_of_equal_stages_is_the_published_one(order: Order, stages: int, micro_batches: int) -> None:
    timeline = simulate([1.0] * stages, [2.0] * stages, micro_batches, order)
    assert timeline.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert timeline.seconds == pytest.approx(3 * (micro_batches + stages - 1))


def test_the_passes_of_1f1b_take_turns_after_a_start() -> None:
    text = " ".join(f"{kind}{micro}" for kind, micro in passes_of(1, 4, 5, "1f1b"))
    assert text == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"


def test_messages_delay_the_first_micro_batch_and_hide_behind_the_others() -> None:
    assert simulate([1, 1], [1, 1], 1, transfer=[0.5]).seconds == pytest.approx(5.0)
    many = simulate([1, 1], [1, 1], 50, "gpipe", transfer=[0.5])
    assert many.seconds == pytest.approx(simulate([1, 1], [1, 1], 50, "gpipe").seconds + 1.0)


def starts(timeline: Timeline, stage: int) -> dict[tuple[str, int], tuple[float, float]]:
    return {(kind, micro): (start, end) for kind, micro, start, end in timeline.passes[stage]}


@given(seconds, st.data(), st.integers(1, 6), st.sampled_from(["gpipe", "1f1b"]))
def test_every_pass_runs_once_and_waits_for_its_input(
    forward: list[float], data: st.DataObject, micro_batches: int, order: Order
) -> None:
    backward = data.draw(st.lists(st.floats(0.1, 5), min_size=len(forward), max_size=len(forward)))
    transfer = data.draw(st.lists(st.floats(0, 1), min_size=len(forward) - 1, max_size=len(forward) - 1))
    timeline = simulate(forward, backward, micro_batches, order, transfer)
    for stage in range(len(forward)):
        own = starts(timeline, stage)
        assert set(own) == {(kind, m) for kind in "FB" for m in range(micro_batches)}
        for m in range(micro_batches):
            assert own["B", m][0] >= own["F", m][1] - 1e-9
            if stage:
                before = starts(timeline, stage - 1)
                assert own["F", m][0] >= before["F", m][1] + transfer[stage - 1] - 1e-9
                assert before["B", m][0] >= own["B", m][1] + transfer[stage - 1] - 1e-9
    assert timeline.seconds >= max(timeline.busy) - 1e-9


@given(seconds, st.integers(1, 6), st.sampled_from(["gpipe", "1f1b"]))
def test_no_stage_holds_more_micro_batches_than_it_is_said_to(forward: list[float], count: int, order: Order) -> None:
    for stage in range(len(forward)):
        alive, most = 0, 0
        for kind, _ in passes_of(stage, len(forward), count, order):
            alive += 1 if kind == "F" else -1
            most = max(most, alive)
        assert most <= held(stage, len(forward), count, order)
