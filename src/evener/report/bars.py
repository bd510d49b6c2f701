"""Bar figures of nodes and runs: how much each node does, which node the others wait for, which run is faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from evener.records.plan import Assignment, Plan
from evener.records.record import TrainRecord
from evener.report.canvas import (
    BLUE,
    DARK,
    GREEN,
    INK,
    LIGHT,
    ORANGE,
    SKY,
    VERMILION,
    bar_axes,
    bars_height,
    canvas,
    empty,
)  # fmt: skip
from evener.report.measured import NodePhases, node_phases
from evener.report.text import ellipsis, human_count, human_seconds, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAME_LENGTH = 28
_MIN_LABELLED_FRACTION = 0.06
_LABEL_WIDTH = 0.32
"""Fraction of the axis that a speed's label may take."""
_PHASES = (
    ("loading", "loading (IO)", SKY),
    ("computing", "forward and backward (FB)", BLUE),
    ("updating", "update (WU)", GREEN),
    ("waiting", "waiting for others (GE)", ORANGE),
)


def phases_figure(record: TrainRecord) -> Figure:
    """Draw how every node of `record` spent its time, and so which node the others wait for.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    nodes = [node for node in node_phases(record) if node.seconds > 0]
    with canvas(9.5, bars_height(max(len(nodes), 2)), "Who waits for whom") as figure:
        axes = figure.subplots()
        if not nodes:
            empty(axes, "no times were recorded")
            return figure
        bar_axes(axes, [ellipsis(node.name, _NAME_LENGTH) for node in nodes], "")
        starts = [0.0] * len(nodes)
        for phase, label, color in _PHASES:
            parts = [getattr(node, phase) / node.seconds for node in nodes]
            _draw_parts(axes, parts, starts, color, label)
            starts = [start + part for start, part in zip(starts, parts, strict=True)]
        _name_the_pacesetter(axes, nodes)
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(lambda value, _: percent(value))
        axes.set_xlabel("of the node's time in steps")
        figure.legend(loc="outside lower center", ncols=len(_PHASES))
    return figure


def _draw_parts(axes: Axes, parts: Sequence[float], starts: Sequence[float], color: str, label: str) -> None:
    axes.barh(range(len(parts)), parts, left=starts, color=color, height=0.68, label=label, edgecolor="white")
    for row, (part, start) in enumerate(zip(parts, starts, strict=True)):
        if part >= _MIN_LABELLED_FRACTION:
            ink = LIGHT if color in (BLUE, GREEN) else DARK
            axes.text(start + part / 2, row, percent(part), ha="center", va="center", fontsize=8.5, color=ink)


def _name_the_pacesetter(axes: Axes, nodes: Sequence[NodePhases]) -> None:
    """Label the node that waits for the smallest fraction of its time: the others wait for it."""
    if len(nodes) < 2:
        return
    row = min(range(len(nodes)), key=lambda index: nodes[index].waiting / nodes[index].seconds)
    axes.text(
        1.01, row, "sets the pace", va="center", fontsize=8.5, color=VERMILION, transform=axes.get_yaxis_transform()
    )


def plan_figure(plan: Plan) -> Figure:
    """Draw how many samples every rank of `plan` gets.

    If speeds are known, a second panel shows that all ranks finish at about the same time.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    ranks = plan.assignments
    labels = [ellipsis(f"{rank.node}  {rank.device}", _NAME_LENGTH) for rank in ranks]
    timed = any(rank.sample_seconds > 0 for rank in ranks)
    with canvas(9.5, bars_height(max(len(ranks), 2)), "Who pulls how much") as figure:
        panels = figure.subplots(1, 2 if timed else 1, squeeze=False, sharey=True)[0]
        bar_axes(panels[0], labels, f"samples of a micro-batch of {plan.micro_batch_size:,}")
        _draw_shares(panels[0], plan)
        if timed:
            bar_axes(panels[1], labels, "predicted time of computing")
            _draw_finishes(panels[1], plan)
            if len(ranks) > 1:
                figure.legend(loc="outside lower center", ncols=2)
    return figure


def _draw_shares(axes: Axes, plan: Plan) -> None:
    samples = [rank.samples * rank.share for rank in plan.assignments]
    bars = axes.barh(range(len(samples)), samples, color=BLUE, height=0.68)
    texts = [f"{rank.samples:,}  ({percent(plan.part(rank))})" for rank in plan.assignments]
    axes.bar_label(bars, texts, padding=4, fontsize=8.5, color=INK)
    axes.set_xlim(0, 1.35 * max(samples))
    axes.set_xlabel("samples")


def _draw_finishes(axes: Axes, plan: Plan) -> None:
    """Draw each rank's seconds with its share over its seconds with an equal share."""
    ranks = plan.assignments
    equal = [_seconds_of(rank, plan.micro_batch_size / len(ranks)) for rank in ranks]
    planned = [_seconds_of(rank, rank.samples * rank.share) for rank in ranks]
    rows = range(len(ranks))
    axes.barh(rows, planned, height=0.68, color=GREEN, label="with these shares")
    if len(ranks) > 1:
        dashes = (0, (2, 2))
        axes.barh(rows, equal, height=0.68, fill=False, edgecolor=INK, linestyle=dashes, label="with equal shares")
    for row, seconds in enumerate(planned):
        axes.annotate(
            human_seconds(seconds), (seconds, row), xytext=(5, 0), textcoords="offset points",
            va="center", fontsize=8.5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.9},
        )  # fmt: skip
    axes.set_xlim(0, 1.25 * max(*equal, *planned))
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter(lambda value, _: human_seconds(value))


def _seconds_of(rank: Assignment, samples: float) -> float:
    return rank.fixed_seconds + samples * rank.sample_seconds if samples else 0.0


def comparison_figure(
    records: Mapping[str, TrainRecord], ranges: Mapping[str, tuple[float, float]] | None = None
) -> Figure:
    """Draw the samples per second of every run in `records`, with speed-ups over the first.

    A line shows the combined speed of the fastest run's nodes if none waited, where its record knows it.

    Args:
        records: records by the name that the figure shows.
        ranges: smallest and largest samples per second by name, where they were measured several times.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    speeds = [record.samples_per_second for record in records.values()]
    of_ideal = max(records.values(), key=lambda record: record.samples_per_second).of_ideal if records else None
    with canvas(9.5, bars_height(max(len(records), 2)), "Which way is faster") as figure:
        axes = figure.subplots()
        if not any(speeds):
            empty(axes, "no runs were recorded")
            return figure
        bar_axes(axes, [ellipsis(name, _NAME_LENGTH) for name in records], "")
        best = max(speeds)
        ideal = best / of_ideal if of_ideal else None
        end = 1.3 * max(best, ideal or 0.0)
        axes.barh(range(len(speeds)), speeds, height=0.62, color=[BLUE if speed == best else SKY for speed in speeds])
        if ideal:
            axes.axvline(ideal, color=VERMILION, linestyle="--", linewidth=1.4)
            axes.text(ideal, -0.62, f" ideal: {human_count(ideal)}", color=VERMILION, fontsize=8.5, va="bottom")
        for row, name in enumerate(records):
            if ranges and name in ranges:
                axes.hlines(row + 0.22, *ranges[name], color=INK, linewidth=2.0)
        for row, speed in enumerate(speeds):
            text = _speed_up(speed, speeds[0], of_ideal if speed == best else None)
            _label_speed(axes, row, speed, text, is_best=speed == best, end=end)
        axes.set_xlim(0, end)
        axes.set_xlabel("samples per second")
    return figure


def _speed_up(speed: float, first: float, of_ideal: float | None) -> str:
    notes = [f"{speed / first:.2f}×"] if first else []
    notes += [f"{percent(of_ideal)} of the ideal"] if of_ideal else []
    return f"{human_count(speed)}  ({', '.join(notes)})" if notes else human_count(speed)


def _label_speed(axes: Axes, row: int, bar_end: float, text: str, *, is_best: bool, end: float) -> None:
    """Label a bar that ends at `bar_end`: inside the bar if there is room, else behind it.

    Inside, the label never covers the line of the ideal.
    """
    is_inside = bar_end > _LABEL_WIDTH * end
    axes.annotate(
        text,
        (bar_end, row),
        xytext=(-6 if is_inside else 6, 0),
        textcoords="offset points",
        ha="right" if is_inside else "left",
        va="center",
        color=(LIGHT if is_best else DARK) if is_inside else INK,
    )
