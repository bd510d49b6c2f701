"""`evener experiment gpipe`: tables 1 to 3 of the GPipe paper (Huang et al., 2019), in a size that runs here.

table 1   the largest AmoebaNet-D and Transformer that train, by number of devices, each of so much memory
table 2   samples a second by stages K and micro-batches M
table 3   the same for the most micro-batches, where tensors travel through the host

Devices are processes of this machine, slowed so that as many as there are share its cores honestly; with `--full` they
are GPUs, and models and memory are those of the paper.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from statistics import median

import torch
from rich.console import Console

from evener.comm.group import Group
from evener.errors import require
from evener.experiments.gpipe_models import FULL, NAIVE, SMALL, Largest, PipelineSpeed, Scale, largest
from evener.experiments.gpipe_report import host_rows, memory_rows, memory_table, speed_table, throughput_rows
from evener.experiments.local_ranks import equal_nodes, measure_on, require_gpus, where
from evener.experiments.options import GpipeConfig, numbers
from evener.experiments.results import Row, write_csv
from evener.launch.nodes import LocalNode
from evener.parallel.pipeline.pipeline import Pipeline
from evener.run.console import open_console, print_line


def speeds(
    scale: Scale, nodes: Sequence[LocalNode], micro_batches: Sequence[int], steps: int, through_host: bool
) -> list[PipelineSpeed]:
    """Of the model that is timed, a stage on each of `nodes`, for every number of micro-batches in turn.

    Args:
        scale: of the model.
        nodes: one a stage.
        micro_batches: numbers M.
        steps: to be timed.
        through_host: whether tensors travel through the memory of the host, even between GPUs.
    """
    on_gpus = all(node.device.startswith("cuda") for node in nodes)
    backend = "nccl" if on_gpus and not through_host else "gloo"
    return measure_on(nodes, partial(_speeds, scale, tuple(micro_batches), steps), list[PipelineSpeed], backend)


def _speeds(scale: Scale, micro_batches: Sequence[int], steps: int, group: Group) -> list[PipelineSpeed]:
    return [_timed(scale, number, steps, group) for number in micro_batches]


def _timed(scale: Scale, micro_batches: int, steps: int, group: Group) -> PipelineSpeed:
    """Steps of all stages; the first one, which warms up, is not counted."""
    torch.manual_seed(0)
    inputs, targets = scale.batch(scale.timed_samples)
    pipeline = Pipeline(
        scale.build_timed(),
        inputs,
        scale.loss,
        micro_batches=micro_batches,
        on=group if group.size > 1 else [group.device],
        schedule="gpipe",
        rematerialise="always",
        costs="estimated",
        weigh=scale.weigh,
    )
    took = []
    for _ in range(steps + 1):
        group.barrier()
        begin = time.perf_counter()
        pipeline.step(inputs, targets)
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)
        group.barrier()
        took.append(time.perf_counter() - begin)
    return PipelineSpeed(
        family=scale.family,
        stages=group.size,
        micro_batches=micro_batches,
        samples_per_second=scale.timed_samples / median(took[1:]),
        bubble=pipeline.timeline().bubble,
    )


def run(config: GpipeConfig, *, as_json: bool, families: Sequence[Scale] = ()) -> dict[str, list[Row]]:
    """Do the experiment; write `gpipe-table-1.csv` and so on.

    Args:
        config: what is asked for; table 1 also tries one device, table 3 takes the largest number of micro-batches.
        as_json: print all rows as the last line.
        families: sizes of the models; by default as the config says.

    Raises:
        InvalidInput: there are too many micro-batches, or too few GPUs; nothing was started.
    """
    full, families = config.full, families or (FULL if config.full else SMALL)
    counts = numbers("--stages", config.stages or ("2,4,8" if full else "2,4"))
    chunks = numbers("--micro-batches", config.micro_batches)
    if full:
        require_gpus("--stages", max(counts))
    for scale in families:
        require(chunks[-1] <= scale.timed_samples, "--micro-batches", chunks[-1], f"at most {scale.timed_samples}")
    console, nodes = open_console(as_json), where(max(counts))
    timer = _SpeedTable(families, counts, config.steps, apart=full)
    found: dict[str, list[Row]] = {}
    for number in numbers("--table", config.table):
        if number == 1:
            tried = sorted({NAIVE, 1, *counts})
            rows = memory_rows([_largest(scale, k, console) for scale in families for k in tried])
            table = memory_table(rows)
        elif number == 2:
            rows = throughput_rows(timer.speeds(chunks, through_host=False))
            table = speed_table("Table 2: throughput", rows, nodes)
        else:
            rows = host_rows(timer.speeds(chunks[-1:], through_host=True))
            table = speed_table("Table 3: throughput through the host", rows, nodes)
        console.print(table)
        write_csv(rows, config.output / f"gpipe-table-{number}.csv")
        found[str(number)] = rows
    console.print(f"wrote {config.output}")
    if as_json:
        print_line(json.dumps({"tables": found}))
    return found


def _largest(scale: Scale, stages: int, console: Console) -> Largest:
    found = largest(scale, stages)
    who = {NAIVE: "naive", 1: "1 device"}.get(stages, f"{stages} devices")
    console.print(f"{scale.family}, {who}: {found.layers} layers, {found.parameters:,} parameters")
    return found


class _SpeedTable:
    """Times each combination once, also where two tables show it.

    Args:
        families: models.
        stages: numbers of them.
        steps: to be timed.
        apart: whether it makes a difference that tensors travel through the host: between processors they always do.
    """

    def __init__(self, families: Sequence[Scale], stages: Sequence[int], steps: int, *, apart: bool) -> None:
        self._families, self._stages, self._steps, self._apart = families, stages, steps, apart
        self._known: dict[tuple[str, int, int, bool], PipelineSpeed] = {}

    def speeds(self, micro_batches: Sequence[int], *, through_host: bool) -> list[PipelineSpeed]:
        """By family, then by stages, then by micro-batches."""
        return [
            speed
            for scale in self._families
            for stages in self._stages
            for speed in self._row(scale, stages, micro_batches, through_host and self._apart)
        ]

    def _row(self, scale: Scale, stages: int, micro_batches: Sequence[int], through_host: bool) -> list[PipelineSpeed]:
        missing = [m for m in micro_batches if (scale.family, stages, m, through_host) not in self._known]
        if missing:
            nodes = equal_nodes(stages, max(self._stages))
            for speed in speeds(scale, nodes, missing, self._steps, through_host):
                self._known[scale.family, stages, speed.micro_batches, through_host] = speed
        return [self._known[scale.family, stages, m, through_host] for m in micro_batches]
