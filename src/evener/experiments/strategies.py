"""`evener experiment resnet152-strategies`: seconds of a step of ResNet-152 by strategy, ranks and batch (C9).

    for batch in batches:
        one process
        for ranks in numbers of ranks:
            for strategy in data, spatial, filter, channel, hybrid, sharded, pipeline (for every number of chunks),
            and, for four ranks and more, pipeline+filter, pipeline+channel, pipeline+hybrid (two ranks a stage):
                the median of some steps, and the bytes that a rank sends

The published curves have 200 classes, 64x64 images, 1 to 8 GPUs and batches of 16 to 2048; `--full` uses these.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from msgspec.structs import asdict
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from evener.comm.group import Group
from evener.config.run_config import STRATEGIES
from evener.experiments.local_ranks import equal_nodes, measure_on, require_gpus, where
from evener.experiments.models.resnet import resnet152
from evener.experiments.options import StrategiesConfig, numbers
from evener.experiments.results import Column, Row, megabytes, table_of, write_csv
from evener.launch.nodes import NodeSpec
from evener.oracle.data_parallel import samples_of_replicas
from evener.oracle.division.layout import Replica
from evener.oracle.division.plan import Arrangement
from evener.oracle.division.rules import division_of
from evener.parallel.parallel_model import Criterion, ParallelModel
from evener.parallel.pipeline.sharded_stage import StageTeams
from evener.parallel.pipeline.staged import StagedModel
from evener.parallel.process_mesh import form_process_mesh
from evener.parallel.replicated import ReplicatedModel
from evener.parallel.sharded import DividedModel
from evener.parallel.shared_statistics import synchronise_norms
from evener.records.errors import DoesNotFit, require
from evener.records.plan import is_of_teams, is_pipeline
from evener.records.schema import Part
from evener.report.canvas import COLORS, LINES, can_draw, canvas, save_png
from evener.report.text import human_seconds
from evener.system import accelerators
from evener.training.console import open_console, print_line
from evener.training.planning import replica_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLASSES = 200
"""The classes of Tiny ImageNet."""


class ResNetSize(Part, frozen=True, kw_only=True):
    """Sizes of a ResNet: rows and columns of an image, channels of the stem, blocks of the four layers."""

    size: int = 64
    width: int = 64
    depths: tuple[int, int, int, int] = (3, 8, 36, 3)

    def build(self) -> nn.Sequential:
        """Return the network with the same weights on every rank."""
        torch.manual_seed(0)
        return resnet152(CLASSES, self.width, self.depths)

    def batch(self, samples: int) -> tuple[Tensor, Tensor]:
        """Return noise images and labels, the same on every rank."""
        draw = torch.Generator().manual_seed(1)
        images = torch.randn(samples, 3, self.size, self.size, generator=draw)
        return images, torch.randint(0, CLASSES, (samples,), generator=draw)


def time_cell(cell: StrategyCell, network: ResNetSize, nodes: Sequence[NodeSpec], steps: int) -> StepTime | None:
    """Time `steps` steps on `nodes`; return None if they do not fit their memory.

    Raises:
        EvenerError: a rank failed for another reason.
    """
    try:
        return measure_on(nodes, partial(_timed, cell, network, steps), StepTime)
    except DoesNotFit:
        return None


def _timed(cell: StrategyCell, network: ResNetSize, steps: int, group: Group) -> StepTime:
    """Time steps of all ranks together; the first step is a warm-up and does not count."""
    images, labels = network.batch(cell.batch)
    samples = samples_of_replicas(cell.rows, [1.0] * cell.ranks, cell.batch)
    replica = next(i for i, row in enumerate(cell.rows) if group.rank in row)
    start, count = sum(samples[:replica]), samples[replica]
    inputs, targets = (tensor[start : start + count].to(group.device) for tensor in (images, labels))
    model = _parallel_model(cell, network, group, replica, inputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    durations: list[float] = []
    before = 0.0
    for _ in range(steps + 1):
        before = group.traffic.sent_bytes
        _wait_for_all(group)
        begin = time.perf_counter()
        optimizer.zero_grad()
        group.timer.resume("fb")
        model.add_gradients(inputs, targets, samples=count, total=cell.batch, is_last=True)
        group.timer.pause()
        group.timer.resume("wu")
        optimizer.step()
        group.timer.close_step(count)
        _wait_for_all(group)
        durations.append(time.perf_counter() - begin)
    (sent,) = group.all_reduce_max([group.traffic.sent_bytes - before])
    counted = durations[1:]
    return StepTime(seconds=median(counted), fastest=min(counted), slowest=max(counted), sent_bytes=round(sent))


def _wait_for_all(group: Group) -> None:
    accelerators.synchronize(group.device)
    group.barrier()


def _parallel_model(
    cell: StrategyCell, network: ResNetSize, group: Group, replica: int, inputs: Tensor
) -> ParallelModel:
    """Return this rank's part of the network."""
    model = network.build()
    criterion = Criterion(loss=F.cross_entropy, autocast=nullcontext, scale=lambda loss: loss)
    if is_pipeline(cell.strategy):
        example = network.batch(cell.batch)[0]
        options = {"example": example, "micro_batches": cell.chunks, "replicas": cell.rows, "teams": _teams(cell)}
        return StagedModel(model, group, replica, criterion, **options)
    model.to(group.device)
    if cell.strategy in ("serial", "data"):
        return ReplicatedModel(synchronise_norms(model, group) if group.size > 1 else model, group, criterion)
    replicas = tuple(Replica(shares=(1.0,) * len(row)) for row in cell.rows)
    arrangement = Arrangement(division=division_of(cell.strategy), replicas=replicas)
    return DividedModel(model, form_process_mesh(group, arrangement), inputs, criterion)


def _teams(cell: StrategyCell) -> StageTeams | None:
    """Return the teams of a pipeline of teams, two ranks per stage; None for other strategies."""
    if not is_of_teams(cell.strategy):
        return None
    teams = tuple((rank, rank + 1) for rank in range(0, cell.ranks, 2))
    return StageTeams(division=division_of(cell.strategy), teams=teams, shares=((1.0, 1.0),) * len(teams))


def run(config: StrategiesConfig, *, as_json: bool, network: ResNetSize | None = None) -> list[StrategyRow]:
    """Run the experiment and write `strategies.csv` and, where matplotlib is installed, curves.

    Args:
        config: configuration.
        as_json: whether to print the rows as the last line.
        network: another network than ResNet-152.

    Raises:
        InvalidInput: a strategy is unknown, or there are too few GPUs; nothing was started.
    """
    cells = cells_of(config)
    max_ranks, steps = max(cell.ranks for cell in cells), config.steps or (20 if config.full else 2)
    if config.full:
        require_gpus("--ranks", max_ranks)
    network = network or ResNetSize(size=config.size)
    console, rows = open_console(as_json), list[StrategyRow]()
    for cell in cells:
        timing = time_cell(cell, network, equal_nodes(cell.ranks, max_ranks), steps)
        rows.append(StrategyRow(cell=cell, timing=timing))
        console.print(line(rows[-1]))
    show(rows, where(max_ranks), console, config.output)
    if as_json:
        print_line(json.dumps({"cells": [as_row(row, rows) for row in rows]}))
    return rows


def cells_of(config: StrategiesConfig) -> list[StrategyCell]:
    """Return the cells to time, in order, without those that lack samples for their ranks or chunks. Raises
    InvalidValue.
    """
    names = [name.strip() for name in config.strategies.split(",")]
    allowed: Sequence[str] = [name for name in STRATEGIES if name != "auto"]
    for name in names:
        require(name in allowed, "--strategies", name, f"some of {', '.join(allowed)}")
    ranks = numbers("--ranks", config.ranks or ("1,2,4,6,8" if config.full else "1,2"))
    batches = numbers("--batch-size", config.batch_size or ("16,64,256,1024,2048" if config.full else "8"))
    chunks = numbers("--chunks", config.chunks or ("2,4,8,16" if config.full else "4"))
    cells = [
        StrategyCell(strategy=strategy, ranks=size, batch=batch, chunks=number)
        for batch in batches
        for size in ranks
        for strategy in (names if size > 1 else ["serial"])
        if not is_of_teams(strategy) or (size % 2 == 0 and size > 2)
        for number in (chunks if is_pipeline(strategy) else (1,))
    ]
    feasible = [cell for cell in cells if cell.strategy == "serial" or cell.batch >= cell.chunks * len(cell.rows)]
    require(bool(feasible), "--batch-size", config.batch_size or "8", "at least a sample per rank and micro-batch")
    return feasible


EPOCH = 100_000
"""The number of training images of Tiny ImageNet."""
_PUBLISHED = (
    "Published, on 1 to 8 GPUs: data scales best; pipelines flatten at 4 to 6 GPUs; filter (`out`) gets slower with "
    "every GPU that is added; hybrid gains a little from 2 to 4."
)


class StrategyCell(Part, frozen=True, kw_only=True):
    """A cell to time; `serial` is one process, `chunks` are the micro-batches of a pipeline, 1 for other strategies."""

    strategy: str
    ranks: int
    batch: int
    chunks: int = 1

    @property
    def rows(self) -> Sequence[Sequence[int]]:
        """The ranks of every replica."""
        if self.strategy in ("serial", "data"):
            return [[rank] for rank in range(self.ranks)]
        return replica_rows(self.strategy, None, self.ranks)


class StepTime(Part, frozen=True, kw_only=True):
    """Median, least and most seconds of a step, and the bytes of the rank that sends most."""

    seconds: float
    fastest: float
    slowest: float
    sent_bytes: int


class StrategyRow(Part, frozen=True, kw_only=True):
    """A cell and its timing; None if it did not fit the memory."""

    cell: StrategyCell
    timing: StepTime | None


def name_of(cell: StrategyCell) -> str:
    """Return the name of the curve that contains a cell."""
    return f"{cell.strategy}, {cell.chunks} chunks" if is_pipeline(cell.strategy) else cell.strategy


def speed_up(row: StrategyRow, rows: Sequence[StrategyRow]) -> float | None:
    """Return the speed-up over one process with the same batch, if both were timed."""
    alone = next((r.timing for r in rows if r.cell.ranks == 1 and r.cell.batch == row.cell.batch), None)
    return alone.seconds / row.timing.seconds if alone and row.timing else None


def as_row(row: StrategyRow, rows: Sequence[StrategyRow]) -> Row:
    """Return a row as a dict: cell, timing, and derived values."""
    timing = {field: getattr(row.timing, field, None) for field in StepTime.__struct_fields__}
    rate = row.cell.batch / row.timing.seconds if row.timing else None
    return {**asdict(row.cell), **timing, "samples_per_second": rate, "speed_up": speed_up(row, rows)}


def line(row: StrategyRow) -> str:
    """Return the line that is printed when a cell is complete."""
    cell = row.cell
    ranks = f"{name_of(cell)}, {cell.ranks} {'rank' if cell.ranks == 1 else 'ranks'}, batch {cell.batch}"
    return f"{ranks}: {row.timing.seconds:.3f} s a step" if row.timing else f"{ranks}: does not fit the memory"


def show(rows: Sequence[StrategyRow], nodes: str, console: Console, output: Path) -> None:
    """Print the table; write `strategies.csv` and, where matplotlib is installed, the curves into `output`."""
    write_csv([as_row(row, rows) for row in rows], output / "strategies.csv")
    console.print(table(rows, nodes))
    _draw(rows, output)
    console.print(f"wrote {output}")


_COLUMNS = (
    Column("strategy", "name"),
    Column(">ranks", "ranks"),
    Column(">batch", "batch"),
    Column(">s a step", "took"),
    Column(">images/s", "samples_per_second", "{:.1f}"),
    Column(">times one process", "speed_up", "{:.2f}"),
    Column(">MB sent", "sent_bytes", megabytes),
)


def table(rows: Sequence[StrategyRow], nodes: str) -> Table:
    """Return the table of all rows."""
    shown = [
        {
            **as_row(row, rows),
            "name": name_of(row.cell),
            "took": f"{row.timing.seconds:.3f}" if row.timing else "does not fit",
        }
        for row in rows
    ]
    return table_of(f"ResNet-152, {nodes}", _COLUMNS, shown, _PUBLISHED)


def _draw(rows: Sequence[StrategyRow], output: Path) -> None:
    """Draw seconds of an epoch by ranks and, for several batches, by batch; do nothing without matplotlib."""
    if not can_draw():
        return
    batches, ranks = (sorted({getattr(row.cell, field) for row in rows}) for field in ("batch", "ranks"))
    _panels([(f"batch {b}", [r for r in rows if r.cell.batch == b]) for b in batches], "ranks", output)
    if len(batches) > 1:
        panels = [(f"{n} ranks", [r for r in rows if r.cell.ranks == n]) for n in ranks if n > 1]
        _panels(panels, "batch", output)


def _panels(panels: Sequence[tuple[str, Sequence[StrategyRow]]], against: str, output: Path) -> None:
    columns = min(len(panels), 3)
    lines = -(-len(panels) // columns)
    with canvas(2.5 + 3.6 * columns, 0.8 + 3.2 * lines, "ResNet-152 on Tiny ImageNet's sizes") as figure:
        subplots = list(figure.subplots(lines, columns, squeeze=False).flat)
        for axes in subplots[len(panels) :]:
            axes.set_axis_off()
        for axes, (title, rows) in zip(subplots, panels, strict=False):
            _curves(axes, rows, against)
            axes.set(title=title, xlabel=against)
        subplots[0].set_ylabel("an epoch of 100 000 images")
        handles, labels = subplots[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center")
        save_png(figure, output / f"strategies-by-{against}.png")


def _curves(axes: Axes, rows: Sequence[StrategyRow], against: str) -> None:
    """Draw one line per strategy; lines by ranks all begin at one process."""
    ticks = sorted({getattr(row.cell, against) for row in rows})
    alone = [row for row in rows if row.cell.ranks == 1]
    names = list(dict.fromkeys(name_of(row.cell) for row in rows if row.cell.ranks > 1))
    for i, name in enumerate(names):
        curve = alone + [row for row in rows if name_of(row.cell) == name]
        at = [ticks.index(getattr(r.cell, against)) for r in curve if r.timing]
        seconds = [r.timing.seconds / r.cell.batch * EPOCH for r in curve if r.timing]
        style = LINES[i // len(COLORS) % len(LINES)]
        axes.plot(at, seconds, f"o{style}", color=COLORS[i % len(COLORS)], label=name)
    axes.set_xticks(range(len(ticks)), [str(tick) for tick in ticks])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: human_seconds(value))
