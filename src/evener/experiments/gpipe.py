"""`evener experiment gpipe`: tables 1 to 3 of the GPipe paper (Huang et al., 2019), at a size for this machine.

    table 1   the largest AmoebaNet-D and Transformer that train, by number of devices with limited memory
    table 2   samples per second by stages K and micro-batches M
    table 3   the same for the most micro-batches, where tensors travel through the host

Devices are processes of this machine, slowed so that they share its cores fairly. With `--full` they are GPUs, with the
models and memory of the paper. With `--planned`, table 1 gives what the division predicts to fit; nothing is trained.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median

import torch
from rich.console import Console

from evener.comm.group import Group
from evener.comm.staged_gloo import BACKEND
from evener.experiments.gpipe_models import FULL, NAIVE, SMALL, Largest, PipelineSpeed, Scale, largest
from evener.experiments.local_ranks import equal_nodes, measure_on, require_gpus, where
from evener.experiments.options import GpipeConfig, numbers
from evener.experiments.results import Column, Row, ratio, table_of, write_csv
from evener.launch.nodes import NodeSpec
from evener.parallel.pipeline.pipeline import Pipeline
from evener.records.errors import require
from evener.report.text import human_bytes, human_count
from evener.system import accelerators
from evener.training.console import open_console, print_line

# Figures measured by Huang et al. (2019).

PUBLISHED_PARAMETERS = {
    "AmoebaNet-D": {NAIVE: 82e6, 1: 318e6, 2: 542e6, 4: 1.05e9, 8: 1.8e9},
    "Transformer": {NAIVE: 282.2e6, 1: 785.8e6, 8: 5.3e9, 32: 21.0e9, 128: 83.9e9},
}
"""Table 1: parameters of the largest trainable model, by number of accelerators, of 8 GB and of 16 GB."""

PUBLISHED_THROUGHPUT = {
    "AmoebaNet-D": {
        (2, 1): 1.0, (4, 1): 1.13, (8, 1): 1.38,
        (2, 4): 1.07, (4, 4): 1.26, (8, 4): 1.72,
        (2, 32): 1.21, (4, 32): 1.84, (8, 32): 3.48,
    },
    "Transformer": {
        (2, 1): 1.0, (4, 1): 1.07, (8, 1): 1.3,
        (2, 4): 1.7, (4, 4): 3.2, (8, 4): 4.8,
        (2, 32): 1.8, (4, 32): 3.4, (8, 32): 6.3,
    },
}  # fmt: skip
"""Table 2: by (stages, micro-batches), relative to two stages and one micro-batch."""

PUBLISHED_WITHOUT_INTERCONNECT = {
    "AmoebaNet-D": {2: 1.0, 4: 1.7, 8: 2.7},
    "Transformer": {2: 1.0, 4: 1.8, 8: 3.3},
}
"""Table 3: by stages, 32 micro-batches, on GPUs whose tensors travel through the host; relative to two stages."""


def _millions(count: float) -> str:
    return f"{human_count(count / 1e6)} M"


_MEMORY = (
    Column("model", "family"),
    Column(">devices", "stages"),
    Column(">layers", "layers"),
    Column(">parameters", "parameters", _millions),
    Column(">times one", "of_one_device", "{:.2f}"),
    Column(">published", "published_parameters", _millions),
    Column(">times one", "published_of_one_device", "{:.2f}"),
    Column(">activations", "activation_bytes", human_bytes),
    Column(">fullest device", "of_memory", "{:.0%}"),
)
_SPEED = (
    Column("model", "family"),
    Column(">K", "stages"),
    Column(">M", "micro_batches"),
    Column(">samples/s", "samples_per_second", "{:.1f}"),
    Column(">relative", "relative", "{:.2f}"),
    Column(">published", "published_relative", "{:.2f}"),
    Column(">idle", "bubble", "{:.0%}"),
    Column(">(K-1)/(M+K-1)", "published_bubble", "{:.0%}"),
)
_CAPTION = "naive: one device that keeps all activations. Fullest: weights, gradients, Adam's state, activations."


def speeds(
    scale: Scale, nodes: Sequence[NodeSpec], micro_batches: Sequence[int], steps: int, through_host: bool
) -> list[PipelineSpeed]:
    """Return the speed of the timed model, with a stage on each of `nodes`, for every number of micro-batches.

    Args:
        scale: sizes of the model.
        nodes: one per stage.
        micro_batches: numbers M.
        steps: number of timed steps.
        through_host: whether tensors travel through host memory, even between GPUs.
    """
    on_gpus = all(accelerators.is_accelerator(node.device) for node in nodes)
    backend = BACKEND if on_gpus and through_host else None
    return measure_on(nodes, partial(_speeds, scale, tuple(micro_batches), steps), list[PipelineSpeed], backend)


def _speeds(scale: Scale, micro_batches: Sequence[int], steps: int, group: Group) -> list[PipelineSpeed]:
    return [_timed(scale, number, steps, group) for number in micro_batches]


def _timed(scale: Scale, micro_batches: int, steps: int, group: Group) -> PipelineSpeed:
    """Time steps of all stages; the first step is a warm-up and does not count."""
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
    seconds = []
    for _ in range(steps + 1):
        group.barrier()
        begin = time.perf_counter()
        pipeline.step(inputs, targets)
        accelerators.synchronize(group.device)
        group.barrier()
        seconds.append(time.perf_counter() - begin)
    return PipelineSpeed(
        family=scale.family,
        stages=group.size,
        micro_batches=micro_batches,
        samples_per_second=scale.timed_samples / median(seconds[1:]),
        bubble=pipeline.timeline().bubble,
    )


def run(config: GpipeConfig, *, as_json: bool, families: Sequence[Scale] = ()) -> dict[str, list[Row]]:
    """Run the experiment and write `gpipe-table-1.csv` and so on.

    Args:
        config: configuration; table 1 also includes one device, table 3 uses the largest number of micro-batches.
        as_json: whether to print all rows as the last line.
        families: sizes of the models; by default those of the configuration.

    Raises:
        InvalidInput: there are too many micro-batches or too few GPUs; nothing was started.
    """
    full, families = config.full, families or (FULL if config.full else SMALL)
    counts = numbers("--stages", config.stages or ("2,4,8" if full else "2,4"))
    chunks = numbers("--micro-batches", config.micro_batches)
    if full and not config.planned:
        require_gpus("--stages", max(counts))
    for scale in families:
        require(chunks[-1] <= scale.timed_samples, "--micro-batches", chunks[-1], f"at most {scale.timed_samples}")
    console, nodes = open_console(as_json), where(max(counts))
    timed: list[PipelineSpeed] = []
    rows_by_table: dict[str, list[Row]] = {}
    for number in numbers("--table", config.table):
        if number == 1:
            stage_counts = sorted({NAIVE, 1, *counts})
            rows = memory_rows([_largest(scale, k, config, console) for scale in families for k in stage_counts])
            title = f"Table 1: the largest model that {'is to fit' if config.planned else 'trains'}"
            table = table_of(title, _MEMORY, rows, _CAPTION)
        elif number == 2:
            timed = _speeds_of(families, counts, chunks, config.steps, through_host=False)
            rows = throughput_rows(timed)
            table = table_of("Table 2: throughput", _SPEED, rows, nodes)
        else:
            timed = [speed for speed in timed if speed.micro_batches == chunks[-1]]
            if full or not timed:  # between CPU processes tensors always travel through the host
                timed = _speeds_of(families, counts, chunks[-1:], config.steps, through_host=True)
            rows = host_rows(timed)
            table = table_of("Table 3: throughput through the host", _SPEED, rows, nodes)
        console.print(table)
        write_csv(rows, config.output / f"gpipe-table-{number}.csv")
        rows_by_table[str(number)] = rows
    console.print(f"wrote {config.output}")
    if as_json:
        print_line(json.dumps({"tables": rows_by_table}))
    return rows_by_table


def _speeds_of(
    families: Sequence[Scale], counts: Sequence[int], chunks: Sequence[int], steps: int, *, through_host: bool
) -> list[PipelineSpeed]:
    """Return the speeds by family, then by stages, then by micro-batches."""
    return [
        speed
        for scale in families
        for stages in counts
        for speed in speeds(scale, equal_nodes(stages, max(counts)), chunks, steps, through_host)
    ]


def _largest(scale: Scale, stages: int, config: GpipeConfig, console: Console) -> Largest:
    model = largest(scale, stages, is_planned=config.planned)
    devices = {NAIVE: "naive", 1: "1 device"}.get(stages, f"{stages} devices")
    console.print(f"{scale.family}, {devices}: {model.layers} layers, {model.parameters:,} parameters")
    return model


def memory_rows(models: Sequence[Largest]) -> list[Row]:
    """Return table 1: each largest model beside the published one; ratios are to one device with re-materialisation."""
    ones = {model.family: model.parameters for model in models if model.stages == 1}
    return [
        {
            "family": model.family,
            "stages": "naive" if model.stages == NAIVE else model.stages,
            "layers": model.layers,
            "parameters": model.parameters,
            "of_one_device": ratio(model.parameters, ones.get(model.family)),
            "published_parameters": _published_parameters(model),
            "published_of_one_device": ratio(_published_parameters(model), PUBLISHED_PARAMETERS[model.family][1]),
            "activation_bytes": model.activation_bytes,
            "fullest": model.fullest,
            "memory": model.memory,
            "of_memory": model.fullest / model.memory,
        }
        for model in models
    ]


def _published_parameters(model: Largest) -> float | None:
    return PUBLISHED_PARAMETERS[model.family].get(model.stages)


def throughput_rows(speeds: Sequence[PipelineSpeed]) -> list[Row]:
    """Return table 2: samples per second relative to the first row of a family, beside the published ratios."""
    return [_speed_row(speed, speeds, PUBLISHED_THROUGHPUT[speed.family]) for speed in speeds]


def host_rows(speeds: Sequence[PipelineSpeed]) -> list[Row]:
    """Return table 3: the same for tensors that travel through the host."""
    return [
        _speed_row(speed, speeds, {(k, speed.micro_batches): v for k, v in known.items()})
        for speed in speeds
        for known in [PUBLISHED_WITHOUT_INTERCONNECT[speed.family]]
    ]


def _speed_row(speed: PipelineSpeed, speeds: Sequence[PipelineSpeed], known: Mapping[tuple[int, int], float]) -> Row:
    """Return a row relative to the first of the family, measured and published, so that both columns begin with 1."""
    first = next(other for other in speeds if other.family == speed.family)
    reference = known.get((first.stages, first.micro_batches))
    return {
        "family": speed.family,
        "stages": speed.stages,
        "micro_batches": speed.micro_batches,
        "samples_per_second": speed.samples_per_second,
        "relative": speed.samples_per_second / first.samples_per_second,
        "published_relative": ratio(known.get((speed.stages, speed.micro_batches)), reference),
        "bubble": speed.bubble,
        "published_bubble": (speed.stages - 1) / (speed.micro_batches + speed.stages - 1),
    }
