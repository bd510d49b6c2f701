"""Figures: what is drawn, and that nothing is left behind."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from evener.oracle.advice import scale
from evener.oracle.cost.model import TrainingJob
from evener.records.errors import MissingExtra
from evener.records.plan import Assignment, Plan
from evener.records.record import Event, TrainRecord
from evener.records.version import pip_install
from evener.report.bars import comparison_figure, phases_figure, plan_figure
from evener.report.canvas import png
from evener.report.figures import learning_figure, throughput_figure
from evener.report.planning_tables import scale_figure
from support.fake_runs import NODES, fake_plan, fake_run
from support.imagined_machines import cluster, convolutions

MANY = tuple((f"node-{index:02}.a-long-name.example.org", "cuda:0", 1e-3 * (1 + index % 5)) for index in range(64))

DRAWINGS: dict[str, Callable[[TrainRecord], Figure]] = {
    "learning": lambda record: learning_figure({"one": record, "two": record}),
    "throughput": throughput_figure,
    "phases": phases_figure,
    "plan": lambda record: plan_figure(record.plan),
    "comparison": lambda record: comparison_figure({"one": record, "two": record}),
}

RUNS: dict[str, Callable[[], TrainRecord]] = {
    "three nodes": fake_run,
    "one node": lambda: fake_run((10,), NODES[:1], num_steps=1, events=False),
    "64 nodes": lambda: fake_run([4 + index % 7 for index in range(64)], MANY, num_steps=2),
    "no steps": lambda: fake_run(num_steps=0),
}


def texts(figure: Figure) -> list[str]:
    legends = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return legends + [text.get_text() for axes in figure.axes for text in axes.texts]


def x_of(line: Line2D) -> list[float]:
    return [float(value) for value in np.asarray(line.get_xdata())]


def y_of(line: Line2D) -> list[float]:
    return [float(value) for value in np.asarray(line.get_ydata())]


def widths(axes: Axes) -> list[float]:
    return [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("drawing", DRAWINGS)
def test_every_figure_is_a_png_and_leaves_none_open(drawing: str, run: str) -> None:
    data = png(DRAWINGS[drawing](RUNS[run]()))
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(data) > 4_000
    assert pyplot.get_fignums() == []


def test_learning_figure_draws_loss_and_accuracy_by_steps_and_seconds() -> None:
    run = fake_run(num_steps=40)
    figure = learning_figure({"one": run, "two": fake_run(num_steps=40, seed=1)})
    by_step, by_second, accuracy_by_step, accuracy_by_second = figure.axes
    for axes in (by_step, by_second, accuracy_by_step, accuracy_by_second):
        assert len(axes.lines) == 2
    assert x_of(by_step.lines[0]) == list(range(1, 41))
    assert y_of(by_step.lines[0]) == [step.loss for step in run.steps]
    assert x_of(by_second.lines[0])[-1] == pytest.approx(sum(step.seconds for step in run.steps))
    assert x_of(accuracy_by_step.lines[0]) == [8, 16, 24, 32, 40]
    assert x_of(accuracy_by_second.lines[0])[0] == pytest.approx(sum(step.seconds for step in run.steps[:8]))
    assert texts(figure) == ["one", "two"]


def test_learning_figure_without_accuracy_draws_only_the_loss() -> None:
    figure = learning_figure({"one": msgspec.structs.replace(fake_run(num_steps=4), validations=())})
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["training loss", ""]


def test_many_steps_are_smoothed_over_faint_raw_lines() -> None:
    axes = learning_figure({"one": fake_run(num_steps=200)}).axes[0]
    raw, smooth = (y_of(line) for line in axes.lines)
    assert axes.lines[0].get_alpha() == 0.18
    assert len(raw) == len(smooth) == 200
    assert roughness(smooth) < 0.5 * roughness(raw)


def roughness(values: list[float]) -> float:
    return sum(abs(after - before) for before, after in pairwise(values))


def test_throughput_figure_names_few_events_and_groups_many() -> None:
    run = fake_run(num_steps=300)
    assert texts(throughput_figure(run)) == [
        "measured", "predicted by the first plan", "rebalanced", "rebalanced", "checkpoint",
    ]  # fmt: skip
    many = tuple(Event(step=step, kind="node lost", message="") for step in range(1, 21))
    figure = throughput_figure(msgspec.structs.replace(run, events=(*run.events, *many)))
    assert texts(figure) == [
        "measured", "predicted by the first plan", "rebalanced (2)", "checkpoint (1)", "node lost (20)",
    ]  # fmt: skip


def test_throughput_is_samples_per_second_beside_the_prediction() -> None:
    run = fake_run(num_steps=5, events=False)
    measured, _, predicted = throughput_figure(run).axes[0].lines
    assert y_of(measured) == [step.samples / step.seconds for step in run.steps]
    assert run.plan.prediction is not None
    assert y_of(predicted) == [run.plan.batch_size / run.plan.prediction.step_seconds] * 2


def test_phases_fill_every_bar_and_mark_the_slowest_node() -> None:
    run = fake_run((34, 33, 33), num_steps=20)
    (axes,) = phases_figure(run).axes
    parts = widths(axes)
    assert len(parts) == 4 * 3
    for rank in range(3):
        assert sum(parts[rank::3]) == pytest.approx(1)
        steps = [step.nodes[rank] for step in run.steps]
        node = run.nodes[rank]
        waiting = sum(step.wait_seconds for step in steps) / (node.seconds_computing + node.seconds_waiting)
        assert parts[9 + rank] == pytest.approx(waiting)
    pace = next(text for text in axes.texts if text.get_text() == "sets the pace")
    assert pace.get_position()[1] == 2
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ada", "bob", "pi-in-the-attic"]


def test_plan_figure_draws_samples_and_times_with_equal_shares() -> None:
    plan = fake_plan()
    shares, times = plan_figure(plan).axes
    assert widths(shares) == [67, 28, 5]
    assert [text.get_text() for text in shares.texts] == ["67  (67 %)", "28  (28 %)", "5  (5.0 %)"]
    speeds = [node[2] for node in NODES]
    planned = [3e-3 + count * seconds for count, seconds in zip((67, 28, 5), speeds, strict=True)]
    equal = [3e-3 + 100 / 3 * seconds for seconds in speeds]
    assert widths(times) == pytest.approx(planned + equal)


def test_plan_figure_without_speeds_draws_only_samples() -> None:
    nodes = [Assignment(rank=rank, node=f"n{rank}", device="cpu", samples=2) for rank in range(2)]
    figure = plan_figure(Plan(strategy="data", batch_size=4, assignments=tuple(nodes)))
    assert len(figure.axes) == 1
    assert figure.legends == []


def test_comparison_figure_has_a_bar_per_run_and_a_line_at_the_ideal() -> None:
    run = fake_run(num_steps=2)
    ways = {"alone": (500.0, None), "equal": (800.0, 0.5), "evener": (1250.0, 0.8)}
    records = {
        name: msgspec.structs.replace(run, samples_per_second=speed, of_ideal=of_ideal)
        for name, (speed, of_ideal) in ways.items()
    }
    (axes,) = comparison_figure(records).axes
    assert widths(axes) == [500, 800, 1250]
    assert [text.get_text() for text in axes.texts] == [
        " ideal: 1,562",
        "500  (1.00×)",
        "800  (1.60×)",
        "1,250  (2.50×, 80 % of the ideal)",
    ]
    assert x_of(axes.lines[0]) == pytest.approx([1562.5, 1562.5])


def test_comparison_figure_without_an_ideal_has_no_line() -> None:
    (axes,) = comparison_figure({"alone": fake_run(num_steps=2)}).axes
    assert len(axes.lines) == 0


@pytest.mark.parametrize("evener", [1000.0, 1660.0, 1740.0, 1750.0, 2400.0])
def test_comparison_labels_do_not_overlap(evener: float) -> None:
    run = fake_run(num_steps=2)
    ways = {"best node alone": 1000.0, "equal shares": 760.0, "evener": evener}
    records = {
        name: msgspec.structs.replace(run, samples_per_second=speed, of_ideal=min(1.0, speed / 1750.0))
        for name, speed in ways.items()
    }
    figure = comparison_figure(records)
    png(figure)
    (axes,) = figure.axes
    ideal, *labels = [text.get_window_extent() for text in axes.texts]
    line = axes.lines[0].get_window_extent()
    for label in labels:
        assert not label.overlaps(line)
        assert not label.overlaps(ideal)
    assert not any(one.overlaps(two) for one, two in itertools.combinations(labels, 2))
    assert ideal.x1 < figure.bbox.x1


def test_figures_without_data_show_a_message() -> None:
    nothing = fake_run(num_steps=0)
    assert texts(learning_figure({"one": nothing})) == ["no steps were recorded"]
    assert texts(throughput_figure(nothing)) == ["no steps were recorded"]
    assert texts(phases_figure(nothing)) == ["no times were recorded"]
    assert texts(comparison_figure({})) == ["no runs were recorded"]


def test_dollar_signs_and_underscores_in_names_are_plain_text() -> None:
    nodes = (("$\\frac_$", "cpu", 1e-3), ("b", "cpu", 1e-3))
    assert png(plan_figure(fake_plan((5, 5), nodes))).startswith(b"\x89PNG")


@pytest.mark.parametrize("drawing", DRAWINGS)
def test_missing_matplotlib_gives_an_install_command(drawing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra) as error:
        DRAWINGS[drawing](fake_run(num_steps=2))
    assert pip_install("report") in str(error.value)


def test_scaling_curves_label_their_ticks() -> None:
    machines, job = cluster([1.0] * 4), TrainingJob(graph=convolutions(), batch_size=64)
    figure = scale_figure(scale(job, machines, (1, 2, 4), ("data", "pipeline")))
    png(figure)
    sides = [side for axes in figure.axes for side in (axes.xaxis, axes.yaxis)]
    labels = [label.get_text() for side in sides for label in side.get_ticklabels()]
    assert {"2", "4"} <= set(labels)
    assert not any("$" in label or "mathdefault" in label for label in labels)
    assert any(label.endswith("s") for label in labels)
