"""The picture of a step of a pipeline: boxes are its actions, gaps the waiting; above stands the idle share."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from evener.oracle.schedule import Kind
from evener.parallel.pipeline.timeline import StageEvent, Timeline
from evener.records.errors import InvalidValue
from evener.report.canvas import png
from evener.report.figures import timeline_figure


def event(stage: int, micro_batch: int, kind: Any, begin: float, end: float) -> StageEvent:
    return StageEvent(stage=stage, micro_batch=micro_batch, kind=kind, begin=begin, end=end)


STEP = Timeline(
    num_stages=2,
    events=(
        event(0, 0, "forward", 7.0, 8.0),
        event(0, 1, "forward", 8.0, 9.0),
        event(1, 0, "forward", 8.0, 9.0),
        event(1, 0, "backward", 9.0, 10.0),
        event(0, 0, "recompute", 9.0, 9.5),
        event(0, 0, "backward", 10.0, 11.0),
    ),
)


def test_every_action_is_a_box_with_its_micro_batch_number() -> None:
    (axes,) = timeline_figure(STEP).axes
    patches: list[Any] = list(axes.patches)
    boxes = {(round(b.get_x(), 6), round(b.get_y() + b.get_height() / 2), round(b.get_width(), 6)) for b in patches}
    expected = {(e.begin - 7.0, e.stage, e.end - e.begin) for e in STEP.events}
    waiting = {(2.5, 0, 0.5)}
    assert boxes == expected | waiting
    written = [(text.get_position(), text.get_text()) for text in axes.texts]
    assert ((1.5, 0.0), "1") in [((round(x, 6), y), text) for (x, y), text in written]


def test_title_shows_the_idle_fraction_beside_that_of_equal_stages() -> None:
    assert STEP.bubble == pytest.approx(1 - 5.5 / 8)
    figure = timeline_figure(STEP)
    assert figure.get_suptitle() == "4.00 s of 2 stages and 2 micro-batches: idle for 31 %, equal stages for 33 %"
    assert [text.get_text() for text in figure.axes[0].texts][-1] == "50 %"


def test_each_kind_is_named_once_in_the_legend() -> None:
    figure = timeline_figure(STEP)
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {
        "forward", "backward", "recompute", "waiting for others",
    }  # fmt: skip
    assert png(figure).startswith(b"\x89PNG")


def test_all_kinds_of_actions_are_drawn() -> None:
    kinds = get_args(Kind)
    events = tuple(event(0, 0, kind, float(at), at + 1.0) for at, kind in enumerate(kinds))
    figure = timeline_figure(Timeline(num_stages=1, events=events))
    assert {text.get_text() for text in figure.legends[0].get_texts()} == set(kinds)


def test_step_without_actions_is_rejected() -> None:
    with pytest.raises(InvalidValue) as error:
        timeline_figure(Timeline(num_stages=2, events=()))
    assert (error.value.field, error.value.value) == ("events", 0)
