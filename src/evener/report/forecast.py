"""Tables and a figure of what the oracle foresees: ranked ways to train, and how each scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from evener.oracle.advice import Curve
from evener.oracle.cost.model import CostEstimate
from evener.oracle.search import Ranking
from evener.plan import Plan
from evener.report.canvas import COLORS, LINES, canvas
from evener.report.text import Row, grid, human_bytes, human_seconds, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def ranking_table(ranking: Ranking) -> Table:
    """Every strategy's best way, fastest first; below, those that cannot run, with the reason."""
    rows: list[Row] = [_estimate_row(ranking, estimate) for estimate in ranking.ranked]
    rejected: list[Row] = [(one.what, "-", "-", "-", "-", "-", "-", "-", "-", one.reason) for one in ranking.rejected]
    job = ranking.model.job
    return grid(
        f"Ways to train {job.graph.name}, {job.batch_size} samples a step",
        (
            "strategy", ">devices", ">a step", ">computing", ">exchanging", ">waiting", ">speed-up", ">sent", ">memory",
            "limited by",
        ),
        [*rows, None, *rejected] if rejected else rows,
        caption="Speed-up: over the best single device. Sent and memory: of the rank that has most.",
    )  # fmt: skip


def _estimate_row(ranking: Ranking, estimate: CostEstimate) -> Row:
    speedup = ranking.speedup(estimate)
    steps = f", {estimate.local_steps} local steps" if estimate.local_steps > 1 else ""
    return (
        ("> " if estimate is ranking.best else "") + estimate.strategy + steps,
        str(len(estimate.devices)),
        human_seconds(estimate.step_seconds),
        human_seconds(estimate.compute_seconds),
        human_seconds(estimate.communication_seconds),
        human_seconds(estimate.waiting_seconds),
        f"{speedup:.2f}" if speedup is not None else "-",
        human_bytes(estimate.sent_bytes),
        human_bytes(estimate.peak_bytes),
        estimate.bottleneck,
    )


def parts_table(plan: Plan) -> Table:
    """Who does how much of a plan: uneven samples, shares of the model, stages."""
    return grid(
        f"Plan: {plan.strategy}",
        ("node", "device", ">replica", ">samples", ">share", "first layer", ">memory"),
        [
            (
                a.node,
                a.device,
                "-" if a.replica is None else str(a.replica),
                str(a.samples),
                percent(a.share),
                a.first_layer or "-",
                human_bytes(a.memory_bytes),
            )
            for a in plan.assignments
        ],
        caption=plan.advice,
    )


def scale_table(curves: Sequence[Curve]) -> Table:
    """Seconds a step of every strategy by number of devices, and the number up to which more devices pay."""
    sizes = sorted({point.devices for curve in curves for point in curve.points})
    rows: list[Row] = []
    for curve in curves:
        seconds = {point.devices: human_seconds(point.estimate.step_seconds) for point in curve.points}
        rows.append((curve.strategy, *(seconds.get(size, "-") for size in sizes), f"{curve.pays_up_to or '-'}"))
    return grid("Seconds a step", ("strategy", *(f">{size}" for size in sizes), "pays up to"), rows)


def scale_figure(curves: Sequence[Curve]) -> Figure:
    """Time, efficiency and memory of every strategy against devices.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    with canvas(14, 4.2, "Scaling") as figure:
        panels = figure.subplots(1, 3)
        for index, curve in enumerate(curve for curve in curves if curve.points):
            _draw(panels, curve, COLORS[index % len(COLORS)], LINES[index // len(COLORS) % len(LINES)])
        titles = ("seconds a step", "efficiency", "memory of the fullest rank [GB]")
        for axes, title in zip(panels, titles, strict=True):
            axes.set_title(title)
            axes.set_xlabel("devices")
            axes.set_xscale("log", base=2)
        panels[0].set_yscale("log")
        panels[2].set_yscale("log")
        panels[2].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.02, 0.5))
        return figure


def _draw(panels: Sequence[Axes], curve: Curve, color: str, line: str) -> None:
    """One strategy; a dot marks where it stops paying."""
    sizes = [point.devices for point in curve.points]
    values = (
        [point.estimate.step_seconds for point in curve.points],
        [point.efficiency for point in curve.points],
        [point.estimate.peak_bytes / 1e9 for point in curve.points],
    )
    last = sizes.index(curve.pays_up_to) if curve.pays_up_to in sizes else 0
    for axes, column in zip(panels, values, strict=True):
        axes.plot(sizes, column, color=color, linestyle=line, label=curve.strategy)
        axes.plot(sizes[last], column[last], marker="o", markersize=4, color=color)
