"""Tables and a figure of what is known before a run: layers, measured machines and predictions of the oracle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from evener.oracle.advice import Curve
from evener.oracle.agreement_costs import LOCAL_STEPS, MIN_COMPUTING, AgreementComparison, AgreementCost
from evener.oracle.break_even import BreakEven
from evener.oracle.cost.model import CostEstimate
from evener.oracle.money_and_energy import Expenses
from evener.oracle.search import Ranking
from evener.oracle.uncertainty import Uncertainty
from evener.records.graph import ModelGraph
from evener.records.plan import Plan
from evener.records.profile import BatchTiming, ClusterProfile, DeviceProfile, TaskTiming, Throughput
from evener.report.canvas import COLORS, LINES, bars_height, canvas, log_axis
from evener.report.text import Row, grid, human_bytes, human_count, human_seconds, percent, table_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GIGA = 1e9
_LONGEST_BAR = 4.0
"""Longest time to a goal that is drawn as a whole."""


def layers_table(graph: ModelGraph) -> Table:
    """Return a table of the layers of `graph` with their costs per sample; its caption sums up the whole model."""
    forward, stored = human_count(graph.forward_flops / 1e6), human_bytes(graph.activation_bytes)
    total = (
        f"{human_count(graph.parameters)} parameters ({human_bytes(graph.parameter_bytes)}); "
        f"per sample {forward} MFLOP forward, {stored} stored for backward"
    )
    return table_of(
        f"Model: {graph.name}",
        {
            "layer": lambda layer: layer.name,
            "kind?": lambda layer: layer.kind,
            "output of a sample?": lambda layer: " x ".join(map(str, layer.output_shape)),
            ">parameters": lambda layer: human_count(layer.parameters),
            ">MFLOP": lambda layer: human_count(layer.forward_flops / 1e6),
            ">stored?": lambda layer: human_bytes(layer.activation_bytes),
            "can be split along": lambda layer: ", ".join(layer.splits),
        },
        graph.layers,
        caption=total,
    )


def profile_table(profile: ClusterProfile) -> Table:
    """Return a table of the devices of `profile`: memory, and speed and score at every measured precision."""
    footnotes: list[str] = []
    rows: list[Row] = []
    for device in profile.devices:
        rows += [*_device_rows(device, footnotes), None]
    return grid(
        "Devices",
        ("node", "device", "model?", ">cores?", ">memory?", ">GB/s?", "precision", ">matmul", ">conv", ">score"),
        rows[:-1],
        caption="\n".join(("Speeds in GFLOP/s; score: geometric mean of matmul and conv.", *footnotes)),
    )


def _device_rows(device: DeviceProfile, footnotes: list[str]) -> Iterator[Row]:
    slowed = f" (slowed to {percent(device.speed)})" if device.speed != 1.0 else ""
    bandwidth = human_count(device.bandwidth / _GIGA) if device.bandwidth else "-"
    memory = human_bytes(device.memory_bytes)
    head: tuple[str, ...] = (device.node, device.device, device.model + slowed, str(device.cores), memory, bandwidth)
    for throughput in device.throughputs:
        yield (*head, *_speed_cells(throughput, footnotes))
        head = ("",) * len(head)
    if not device.throughputs:
        yield (*head, "-", "-", "-", "-")


def _speed_cells(throughput: Throughput, footnotes: list[str]) -> tuple[str, ...]:
    speeds = (throughput.matmul_flops, throughput.conv_flops)
    mark = _footnote(throughput.reason, footnotes) if None in speeds and throughput.reason else ""
    total = throughput.score
    return (
        throughput.precision,
        *(f"unsupported{mark}" if speed is None else human_count(speed / _GIGA) for speed in speeds),
        "-" if total is None else human_count(total),
    )


def _footnote(reason: str, footnotes: list[str]) -> str:
    """Return the mark of `reason`; append it to `footnotes` if it is not there yet."""
    numbered = [line.partition(" ")[2] for line in footnotes]
    if reason not in numbered:
        footnotes.append(f"[{len(footnotes) + 1}] {reason}")
        numbered.append(reason)
    return f" [{numbered.index(reason) + 1}]"


def links_table(profile: ClusterProfile) -> Table:
    """Return a table of the measured links of `profile`: latency in microseconds, bandwidth in GB/s."""
    names = [f"{device.node} {device.device}" for device in profile.devices]
    return table_of(
        "Links",
        {
            "from": lambda link: names[link.source],
            "to": lambda link: names[link.target],
            "backend": lambda link: link.backend,
            ">latency µs": lambda link: human_count(link.alpha * 1e6),
            ">GB/s": lambda link: human_count(1 / link.beta / _GIGA) if link.beta else "-",
        },
        profile.links,
    )


def timing_table(profile: ClusterProfile) -> Table:
    """Return a table of seconds per sample, forward and backward, of every task measured on a device of `profile`."""
    timed = [(device, timing) for device in profile.devices for timing in device.timings]
    sizes = sorted({batch.samples for _, timing in timed for batch in timing.batches})
    return grid(
        "Time per sample, by samples of the batch",
        (
            "task",
            "precision?",
            "node",
            "device",
            *(f">{size}?" for size in sizes[:-1]),
            *(f">{size}" for size in sizes[-1:]),
            ">update",
            ">largest batch",
        ),
        [_timing_row(device, timing, sizes) for device, timing in timed],
    )


def _timing_row(device: DeviceProfile, timing: TaskTiming, sizes: list[int]) -> Row:
    batches: dict[int, BatchTiming] = {batch.samples: batch for batch in timing.batches}
    each = [human_seconds(batches[size].seconds / size) if size in batches else "-" for size in sizes]
    largest = "-" if timing.max_samples is None else str(timing.max_samples)
    head = (timing.task, timing.precision, device.node, device.device)
    return (*head, *each, human_seconds(timing.update_seconds), largest)


def ranking_table(ranking: Ranking, uncertainty: Uncertainty | None = None) -> Table:
    """Return a table of each strategy's best plan, fastest first.

    The caption says how sure the predictions are, and what cannot run, and why.

    Args:
        ranking: plans.
        uncertainty: of the predictions; None where it is not known.
    """
    rows: list[Row] = [_estimate_row(ranking, estimate) for estimate in ranking.ranked]
    names: dict[str, list[str]] = {}
    for one in ranking.rejected:
        names.setdefault(one.reason, []).append(one.what)
    caption = "Speed-up: over the best single device. Sent and memory: of the rank with the most."
    rejected = [f"Not used: {', '.join(what)}: {reason}." for reason, what in names.items()]
    job = ranking.model.job
    return grid(
        f"Strategies for {job.graph.name}, {job.batch_size} samples a step",
        (
            "strategy", ">devices", ">a step", ">computing?", ">exchanging?", ">waiting?", ">speed-up", ">sent?",
            ">memory", "limited by",
        ),
        rows,
        caption="\n".join([caption, *_how_sure(ranking, uncertainty), *rejected]),
    )  # fmt: skip


def _how_sure(ranking: Ranking, uncertainty: Uncertainty | None) -> list[str]:
    """Return sentences about the uncertainty of a ranking."""
    if uncertainty is None:
        return ["How far these predictions may be off is not known: nothing was measured on these machines."]
    spread, alike = uncertainty
    sentences = [
        f"Four steps of five take between 1/{1 + spread:.2f} and {1 + spread:.2f} times the predicted seconds."
    ]
    if names := [one.strategy for one in ranking.alike(1 + alike)]:
        sentences.append(f"As fast as {ranking.best.strategy}, as far as can be told: {', '.join(names)}.")
    return sentences


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


_PARTS = {
    "computing": "computing",
    "thin_layers": "thin layers",
    "copies": "copies",
    "update": "update",
    "layers": "between layers",
    "stages": "between stages",
    "gradients": "gradients",
    "statistics": "BatchNorm",
    "parameters": "parameters",
    "slower_ranks": "slower ranks",
    "idle": "idle stages",
    "server_link": "server's link",
}
"""Headings of the parts of a step."""


def time_table(ranking: Ranking) -> Table:
    """Return a table of what takes the time of each strategy's best plan, by kind."""
    parts = {id(estimate): estimate.parts.by_kind() for estimate in ranking.ranked}
    used = [name for name in _PARTS if any(seconds[name] > 0 for seconds in parts.values())]
    rows: list[Row] = [
        (
            ("> " if estimate is ranking.best else "") + estimate.strategy,
            human_seconds(estimate.step_seconds),
            *(_part(parts[id(estimate)][name] / estimate.step_seconds) for name in used),
        )
        for estimate in ranking.ranked
    ]
    return grid(
        "Where the time of a step goes",
        ("strategy", ">a step", *(f">{_PARTS[name]}" for name in used)),
        rows,
        caption=(
            "Thin layers: what parts of divided layers take beyond their part of the whole. Copies: splitting and "
            "joining tensors.\nBetween layers or stages, gradients, BatchNorm, parameters: exchanges that computing "
            "does not hide. Slower ranks, idle stages, server's link: waiting."
        ),
    )


def _part(fraction: float) -> str:
    return percent(fraction) if fraction > 0 else "-"


def parts_table(plan: Plan) -> Table:
    """Return a table of what each rank does under `plan`: samples, shares of the model, stages."""
    return table_of(
        f"Plan: {plan.strategy}",
        {
            "node": lambda a: a.node,
            "device": lambda a: a.device,
            ">replica?": lambda a: "-" if a.replica is None else str(a.replica),
            ">samples": lambda a: str(a.samples),
            ">share": lambda a: percent(a.share),
            "first layer?": lambda a: a.first_layer or "-",
            ">memory": lambda a: human_bytes(a.memory_bytes),
        },
        plan.assignments,
    )


def changes_table(changes: Sequence[BreakEven], batch_size: int) -> Table:
    """Return a table of what would change the best plan, in either direction."""
    return table_of(
        "What would change the answer",
        {
            "if there were": lambda one: _change(one, batch_size),
            "the best would be": lambda one: one.strategy,
            ">devices": lambda one: str(one.devices or "-"),
        },
        changes,
        caption="Each alone, all links or devices alike; factors within 5 %.",
    )


def _change(one: BreakEven, batch_size: int) -> str:
    """Return a change in words; of one that changes nothing, how far it was tried."""
    tried = ""
    if not one.is_change:
        tried = "up to " if one.factor > 1 else "down to "
    if one.varied == "batch":
        return f"{tried}{max(1, round(batch_size * one.factor))} samples a step"
    times = f"{human_count(one.factor)} times" if one.factor > 1 else f"1/{human_count(1 / one.factor)}"
    return f"{one.varied} {tried}{times} as {'fast' if one.varied == 'links' else 'much'}"


def expenses_table(expenses: Sequence[Expenses]) -> Table:
    """Return a table of what plans take for a million samples, the cheapest first."""
    return table_of(
        "Expenses of a million samples",
        {
            "strategy": lambda one: one.strategy,
            ">devices": lambda one: str(one.devices),
            ">hours": lambda one: human_count(one.hours),
            ">money": lambda one: "-" if one.price is None else human_count(one.price),
            ">kWh": lambda one: "-" if one.energy is None else human_count(one.energy),
            "nodes?": lambda one: ", ".join(one.nodes),
        },
        expenses,
        caption="A plan pays for every node that it uses. `serial`: the cheapest device of each kind alone.",
    )


def agreements_table(comparison: AgreementComparison) -> Table:
    """Return a table of the agreements of a master's nodes, the fastest to a goal first, and of the best ranks."""
    exact, chosen = comparison.exact, comparison.chosen
    return table_of(
        f"Agreements of nodes with a master on {comparison.master}",
        {
            "agreement": lambda one: ("> " if one is chosen else "") + one.agreement,
            "compression": lambda one: one.compression,
            ">local steps": lambda one: str(one.local_steps),
            ">devices?": lambda one: str(one.devices),
            ">a round": lambda one: human_seconds(one.seconds),
            ">computing": lambda one: percent(one.computing),
            ">a contribution?": lambda one: human_bytes(one.sent_bytes),
            ">samples": lambda one: f"{one.needed:g}",
            ">speed": lambda one: f"{exact.goal_seconds / one.goal_seconds:.2f}",
            ">break-even": lambda one: f"{one.break_even(exact):.2f}",
        },
        [*comparison.costs, comparison.ranks],
        caption=(
            f"Every device is a node. Local steps: the fewest with which nodes compute {percent(MIN_COMPUTING)} of the "
            f"time, at most {LOCAL_STEPS[-1]} or an epoch; `average` and `diloco` take equally long.\n"
            "Samples until a goal, relative to `sync`: assumed, as measured with mnist's network until 97 %.\n"
            f"Speed to the goal, relative to {exact.agreement}; break-even: samples with which it is as fast as that."
        ),
    )


def agreements_figure(comparison: AgreementComparison) -> Figure:
    """Draw the time to a goal of every agreement as a bar of computing and exchanging.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    bars, exact = [*comparison.costs, comparison.ranks], comparison.exact
    relative = [one.goal_seconds / exact.goal_seconds for one in bars]
    computing = [size * one.computing for size, one in zip(relative, bars, strict=True)]
    exchanging = [size - part for size, part in zip(relative, computing, strict=True)]
    needed = sorted({one.needed for one in bars} - {1.0})
    with canvas(8, bars_height(len(bars)), f"Time to a goal, relative to {exact.agreement}") as figure:
        axes = figure.subplots()
        places = range(len(bars))
        axes.barh(places, computing, color=COLORS[0], height=0.68, label="computing")
        axes.barh(places, exchanging, left=computing, color=COLORS[1], height=0.68, label="exchanging")
        axes.set_yticks(places, [_agreement_label(one) for one in bars])
        axes.invert_yaxis()
        axes.set_xlim(0, min(1.1 * max(relative), _LONGEST_BAR))
        for place, size in zip(places, relative, strict=True):
            axes.text(min(size, 0.93 * _LONGEST_BAR), place, f" {size:.2f}", va="center", fontsize=8)
        if needed:
            times = " or ".join(f"{one:g}" for one in needed)
            axes.set_xlabel(f"assumed: local steps and compression need {times} times the samples of sync")
        axes.legend(fontsize=7)
        return figure


def _agreement_label(one: AgreementCost) -> str:
    steps = f", {one.local_steps}" if one.local_steps > 1 else ""
    code = "" if one.compression == "none" else f", {one.compression}"
    return f"{one.agreement}{steps}{code}"


def scale_table(curves: Sequence[Curve]) -> Table:
    """Return a table of seconds per step by strategy and number of devices, and how many devices still help."""
    sizes = sorted({point.devices for curve in curves for point in curve.points})
    rows: list[Row] = []
    for curve in curves:
        seconds = {point.devices: human_seconds(point.estimate.step_seconds) for point in curve.points}
        rows.append((curve.strategy, *(seconds.get(size, "-") for size in sizes), f"{curve.pays_up_to or '-'}"))
    return grid("Seconds a step", ("strategy", *(f">{size}" for size in sizes), "pays up to"), rows)


def scale_figure(curves: Sequence[Curve]) -> Figure:
    """Draw step time, efficiency and memory of every strategy against the number of devices.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    with canvas(14, 4.2, "Scaling") as figure:
        panels = figure.subplots(1, 3)
        for index, curve in enumerate(curve for curve in curves if curve.points):
            _draw(panels, curve, COLORS[index % len(COLORS)], LINES[index // len(COLORS) % len(LINES)])
        titles = ("a step", "efficiency", "memory of the fullest rank [GB]")
        for axes, title in zip(panels, titles, strict=True):
            axes.set_title(title)
            axes.set_xlabel("devices")
            log_axis(axes, "x", 2, (1.0,), lambda value: f"{value:g}")
        log_axis(panels[0], "y", 10, (1.0, 2.0, 5.0), human_seconds)
        log_axis(panels[2], "y", 10, (1.0, 2.0, 5.0), lambda value: f"{value:g}")
        panels[2].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.02, 0.5))
        return figure


def _draw(panels: Sequence[Axes], curve: Curve, color: str, line: str) -> None:
    """Draw one strategy; a dot marks the last number of devices that still helps."""
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
