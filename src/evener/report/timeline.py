"""A step of a pipeline as a picture: which stage computed which micro-batch when, and where it waited."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from evener.errors import require
from evener.report.canvas import BLUE, FAINT, GREEN, INK, MUTED, ORANGE, SKY, bar_axes, bars_height, canvas
from evener.report.text import human_seconds, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from evener.parallel.pipeline.timeline import StageEvent, Timeline

_COLORS = {"forward": BLUE, "recompute": SKY, "backward": GREEN, "evaluate": BLUE}
_WAITING = "waiting for others"
_HEIGHT = 0.68
_NARROWEST_LABELLED = 0.016
"""Of the width of the picture."""


def timeline_figure(timeline: Timeline) -> Figure:
    """A row a stage, a box an action with the number of its micro-batch; beside it the share of the step it computed.

    Args:
        timeline: of a step.

    Raises:
        MissingExtra: Matplotlib is not installed.
        InvalidValue: nothing was timed.
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
                stage, other.begin - one.end, left=one.end - start, height=_HEIGHT, color=FAINT, hatch="////",
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
    color = _COLORS[event.kind]
    axes.barh(
        event.stage, width, left=left, height=_HEIGHT, color=color, edgecolor="white", linewidth=0.5, label=event.kind
    )
    if width >= _NARROWEST_LABELLED * length:
        ink = INK if color == SKY else "white"
        text = str(event.micro_batch)
        axes.text(left + width / 2, event.stage, text, ha="center", va="center", fontsize=8, color=ink)
