"""`evener experiment gpipe`: tables 1 to 3 of the GPipe paper (Huang et al., 2019), in a size that runs here.

table 1   the largest AmoebaNet-D and Transformer that train, by number of devices, each of so much memory
table 2   samples a second by stages K and micro-batches M
table 3   the same for the most micro-batches, where tensors travel through the host

Devices are processes of this machine, slowed so that as many as there are share its cores honestly; with `--full` they
are GPUs, and models and memory are those of the paper.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from evener.errors import require
from evener.experiments.gpipe_memory import Largest, largest
from evener.experiments.gpipe_models import FULL, SMALL, Scale
from evener.experiments.gpipe_published import NAIVE
from evener.experiments.gpipe_report import (
    Row,
    host_rows,
    memory_rows,
    memory_table,
    speed_table,
    throughput_rows,
    write_csv,
)
from evener.experiments.gpipe_speed import Speed, speeds
from evener.experiments.strategies_nodes import equal_nodes, numbers, require_gpus, where
from evener.run.console import open_console, print_line


def gpipe(
    *,
    tables: str,
    stages: str | None,
    micro_batches: str,
    steps: int,
    full: bool,
    output: Path,
    as_json: bool,
    scales: Sequence[Scale] | None = None,
) -> dict[str, list[Row]]:
    """Do the experiment; write `gpipe-table-1.csv` and so on into `output`.

    Args:
        tables: numbers of them, such as 1,2,3.
        stages: numbers K to try, such as 2,4; table 1 also tries one device.
        micro_batches: numbers M to try in table 2; the largest one in table 3.
        steps: to be timed.
        full: models and memory of the paper, on GPUs.
        output: folder of the tables.
        as_json: print all rows as the last line.
        scales: sizes of the models; by default as `full` says.

    Raises:
        InvalidInput: a word is wrong; nothing was started.
    """
    wanted, counts = numbers("--table", tables), numbers("--stages", stages or ("2,4,8" if full else "2,4"))
    chunks = numbers("--micro-batches", micro_batches)
    require(max(wanted) <= 3, "--table", tables, "some of 1,2,3")
    require(steps > 0, "--steps", steps, "positive")
    require(output.is_dir() or not output.exists(), "--output", str(output), "a folder")
    if full:
        require_gpus("--stages", max(counts))
    families = scales or (FULL if full else SMALL)
    for scale in families:
        require(chunks[-1] <= scale.timed_samples, "--micro-batches", chunks[-1], f"at most {scale.timed_samples}")
    console = open_console(as_json)
    timer = _Timer(families, counts, steps, apart=full)
    found: dict[str, list[Row]] = {}
    if 1 in wanted:
        tried = sorted({NAIVE, 1, *counts})
        found["1"] = memory_rows([_largest(scale, k, console) for scale in families for k in tried])
        console.print(memory_table(found["1"]))
    if 2 in wanted:
        found["2"] = throughput_rows(timer.speeds(chunks, through_host=False))
        console.print(speed_table("Table 2: throughput", found["2"], where(max(counts))))
    if 3 in wanted:
        found["3"] = host_rows(timer.speeds(chunks[-1:], through_host=True))
        console.print(speed_table("Table 3: throughput through the host", found["3"], where(max(counts))))
    for number, rows in found.items():
        write_csv(rows, output / f"gpipe-table-{number}.csv")
    console.print(f"wrote {output}")
    if as_json:
        print_line(json.dumps({"tables": found}))
    return found


def _largest(scale: Scale, stages: int, console: Console) -> Largest:
    found = largest(scale, stages)
    who = {NAIVE: "naive", 1: "1 device"}.get(stages, f"{stages} devices")
    console.print(f"{scale.family}, {who}: {found.layers} layers, {found.parameters:,} parameters")
    return found


class _Timer:
    """Times each combination once, also where two tables show it.

    Args:
        families: models.
        stages: numbers of them.
        steps: to be timed.
        apart: whether it makes a difference that tensors travel through the host: between processors they always do.
    """

    def __init__(self, families: Sequence[Scale], stages: Sequence[int], steps: int, *, apart: bool) -> None:
        self._families, self._stages, self._steps, self._apart = families, stages, steps, apart
        self._known: dict[tuple[str, int, int, bool], Speed] = {}

    def speeds(self, micro_batches: Sequence[int], *, through_host: bool) -> list[Speed]:
        """By family, then by stages, then by micro-batches."""
        return [
            speed
            for scale in self._families
            for stages in self._stages
            for speed in self._row(scale, stages, micro_batches, through_host and self._apart)
        ]

    def _row(self, scale: Scale, stages: int, micro_batches: Sequence[int], through_host: bool) -> list[Speed]:
        missing = [m for m in micro_batches if (scale.family, stages, m, through_host) not in self._known]
        if missing:
            nodes = equal_nodes(stages, max(self._stages))
            for speed in speeds(scale, nodes, missing, self._steps, through_host):
                self._known[scale.family, stages, speed.micro_batches, through_host] = speed
        return [self._known[scale.family, stages, m, through_host] for m in micro_batches]
