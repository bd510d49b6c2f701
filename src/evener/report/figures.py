"""Figures over time: loss, accuracy and throughput of runs, and the timeline of a pipeline's step."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from evener.records.errors import require
from evener.records.record import Event, TrainRecord
from evener.report.canvas import (
    BLUE,
    COLORS,
    DARK,
    FAINT,
    GREEN,
    INK,
    LIGHT,
    LINES,
    MUTED,
    ORANGE,
    PURPLE,
    SKY,
    bar_axes,
    bars_height,
    canvas,
    empty,
)
from evener.report.text import ellipsis, human_seconds, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from evener.oracle.schedule import Kind
    from evener.parallel.pipeline.timeline import StageEvent, Timeline

_MAX_LABELLED_EVENTS = 8


class _Curve(NamedTuple):
    """The series of one run: losses by entry and accuracies by validation, against steps and seconds."""

    label: str
    color: str
    line: str
    steps: list[float]
    seconds: list[float]
    losses: list[float]
    validated_steps: list[float]
    validated_seconds: list[float]
    accuracies: list[float]


def learning_figure(records: Mapping[str, TrainRecord]) -> Figure:
    """Draw the training loss and validation accuracy of all `records` against optimiser steps and seconds of training.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    curves = [_curve(index, name, record) for index, (name, record) in enumerate(records.items())]
    curves = [curve for curve in curves if curve.steps]
    with_accuracy = any(curve.accuracies for curve in curves)
    rows = 2 if with_accuracy else 1
    with canvas(9.5, 1.1 + 2.6 * rows, "Learning") as figure:
        if not curves:
            empty(figure.subplots(), "no steps were recorded")
            return figure
        grid = figure.subplots(rows, 2, sharex="col", sharey="row", squeeze=False)
        for curve in curves:
            _draw_losses(grid[0][0], curve.steps, curve)
            _draw_losses(grid[0][1], curve.seconds, curve)
            if with_accuracy:
                _draw_accuracies(grid[1][0], curve.validated_steps, curve)
                _draw_accuracies(grid[1][1], curve.validated_seconds, curve)
        grid[0][0].set_title("training loss")
        if with_accuracy:
            grid[1][0].set_title("validation accuracy")
            grid[1][0].yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
        grid[-1][0].set_xlabel("optimiser step")
        grid[-1][1].set_xlabel("seconds of training, validation excluded")
        if len(curves) > 1:
            handles, labels = grid[0][0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=min(len(curves), 3))
    return figure


def _curve(index: int, name: str, record: TrainRecord) -> _Curve:
    steps: list[float] = [entry.step for entry in record.steps]
    seconds = list(accumulate(entry.seconds for entry in record.steps))
    validated = [(v.step, v.accuracy) for v in record.validations if v.accuracy is not None]
    return _Curve(
        label=ellipsis(name, 36),
        color=COLORS[index % len(COLORS)],
        line=LINES[index // len(COLORS) % len(LINES)],
        steps=steps,
        seconds=seconds,
        losses=[math.nan if entry.loss is None else entry.loss for entry in record.steps],
        validated_steps=[step for step, _ in validated],
        validated_seconds=[_seconds_at(step, steps, seconds) for step, _ in validated],
        accuracies=[accuracy for _, accuracy in validated],
    )


def _seconds_at(step: int, steps: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the seconds of training up to `step`; the entry that contains `step` counts in full."""
    done = bisect_right(steps, step)
    return seconds[done - 1] if done else 0.0


def _draw_losses(axes: Axes, x_values: Sequence[float], curve: _Curve) -> None:
    smooth = _rolling_median(curve.losses)
    if smooth != curve.losses:
        axes.plot(x_values, curve.losses, color=curve.color, alpha=0.18, linewidth=0.8)
    marker = "o" if len(x_values) == 1 else None
    axes.plot(x_values, smooth, curve.line, color=curve.color, label=curve.label, marker=marker)


def _draw_accuracies(axes: Axes, x_values: Sequence[float], curve: _Curve) -> None:
    marker = "o" if len(x_values) <= 30 else None
    axes.plot(x_values, curve.accuracies, curve.line, color=curve.color, marker=marker, markersize=4.5)


def throughput_figure(record: TrainRecord) -> Figure:
    """Draw the samples per second of every step of `record`, the prediction of the plan, and the events.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    entries = [entry for entry in record.steps if entry.seconds > 0]
    with canvas(9.5, 3.6, "Throughput") as figure:
        axes = figure.subplots()
        if not entries:
            empty(axes, "no steps were recorded")
            return figure
        steps = [entry.step for entry in entries]
        speeds = [entry.samples / entry.seconds for entry in entries]
        smooth = _rolling_median(speeds)
        axes.plot(steps, speeds, color=BLUE, alpha=0.22, linewidth=0.8)
        axes.plot(steps, smooth, color=BLUE, marker="o" if len(steps) == 1 else None, label="measured")
        prediction, predicted = record.plan.prediction, 0.0
        if prediction and prediction.step_seconds > 0:
            predicted = record.plan.batch_size / prediction.step_seconds
            axes.axhline(predicted, color=MUTED, linestyle="--", linewidth=1.2, label="predicted by the first plan")
        _mark_events(axes, record.events)
        axes.set_ylim(0, 1.12 * max(*smooth, predicted))
        axes.set_xlabel("optimiser step")
        axes.set_ylabel("samples per second")
        figure.legend(loc="outside lower center", ncols=5)
    return figure


def _mark_events(axes: Axes, events: Sequence[Event]) -> None:
    """Draw a line at every event.

    Few events get a label each; many get one legend entry per kind.
    """
    kinds = list(dict.fromkeys(event.kind for event in events))
    few = len(events) <= _MAX_LABELLED_EVENTS
    for index, kind in enumerate(kinds):
        steps = [event.step for event in events if event.kind == kind]
        color = COLORS[1:][index % (len(COLORS) - 1)]
        for step in steps:
            axes.axvline(step, color=color, linewidth=1.1, linestyle=":")
            if few:
                _label_event(axes, step, kind)
        if not few:
            axes.plot([], [], color=color, linestyle=":", label=f"{ellipsis(kind, 24)} ({len(steps)})")


def _label_event(axes: Axes, step: float, kind: str) -> None:
    axes.annotate(
        ellipsis(kind, 24),
        (step, 0.0),
        xycoords=("data", "axes fraction"),
        xytext=(2, 4),
        textcoords="offset points",
        rotation=90,
        va="bottom",
        fontsize=8.5,
        color=INK,
    )


def _rolling_median(values: list[float]) -> list[float]:
    """Smooth `values` over 2 % of their number on either side; fewer than 50 values are returned as they are."""
    reach = len(values) // 50
    return [median(values[max(0, index - reach) : index + reach + 1]) for index in range(len(values))]


_ACTION_COLORS: Mapping[Kind, str] = {
    "forward": BLUE,
    "recompute": SKY,
    "backward": GREEN,
    "weights": PURPLE,
    "evaluate": BLUE,
}
_WAITING = "waiting for others"
_BOX_HEIGHT = 0.68
_MIN_LABELLED_FRACTION = 0.016
"""Fraction of the figure's width below which a box gets no label."""


def timeline_figure(timeline: Timeline) -> Figure:
    """Draw a row per stage and a box per action with its micro-batch; beside a row, the stage's busy fraction.

    Args:
        timeline: events of one step.

    Raises:
        MissingExtra: Matplotlib is not installed.
        InvalidValue: the timeline has no events.
    """
    events = timeline.events
    require(len(events) > 0, "events", len(events), "at least one action of a step")
    start = min(event.begin for event in events)
    length = max(event.end for event in events) - start
    with canvas(11, bars_height(max(timeline.num_stages, 2)), _title(timeline, length)) as figure:
        axes = figure.subplots()
        bar_axes(axes, [f"stage {stage}" for stage in range(timeline.num_stages)], "")
        for stage in range(timeline.num_stages):
            _draw_stage(axes, [event for event in events if event.stage == stage], stage, start, length)
        axes.set_xlim(0, length)
        axes.xaxis.set_major_formatter(lambda value, _: human_seconds(value))
        axes.locator_params(axis="x", nbins=8)
        handles, labels = axes.get_legend_handles_labels()
        known = dict(zip(labels, handles, strict=True))
        figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=len(known))
    return figure


def _title(timeline: Timeline, length: float) -> str:
    stages, micro_batches = timeline.num_stages, len({event.micro_batch for event in timeline.events})
    equal = (stages - 1) / (micro_batches + stages - 1)
    return (
        f"{human_seconds(length)} of {stages} stages and {micro_batches} micro-batches: "
        f"idle for {percent(timeline.bubble)}, equal stages for {percent(equal)}"
    )


def _draw_stage(axes: Axes, events: Sequence[StageEvent], stage: int, start: float, length: float) -> None:
    ordered = sorted(events, key=lambda event: event.begin)
    for one, other in pairwise(ordered):
        if other.begin > one.end:
            axes.barh(
                stage, other.begin - one.end, left=one.end - start, height=_BOX_HEIGHT, color=FAINT, hatch="////",
                edgecolor=ORANGE, linewidth=0, label=_WAITING,
            )  # fmt: skip
    for event in ordered:
        _draw_box(axes, event, start, length)
    busy = sum(event.end - event.begin for event in ordered)
    axes.text(
        1.01, stage, percent(busy / length), va="center", fontsize=8.5, color=MUTED,
        transform=axes.get_yaxis_transform(),
    )  # fmt: skip


def _draw_box(axes: Axes, event: StageEvent, start: float, length: float) -> None:
    width, left = event.end - event.begin, event.begin - start
    color = _ACTION_COLORS[event.kind]
    axes.barh(
        event.stage,
        width,
        left=left,
        height=_BOX_HEIGHT,
        color=color,
        edgecolor="white",
        linewidth=0.5,
        label=event.kind,
    )
    if width >= _MIN_LABELLED_FRACTION * length:
        ink = DARK if color in (SKY, PURPLE) else LIGHT
        text = str(event.micro_batch)
        axes.text(left + width / 2, event.stage, text, ha="center", va="center", fontsize=8, color=ink)
