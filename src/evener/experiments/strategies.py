"""`evener experiment resnet152-strategies`: seconds of a step of ResNet-152 by strategy, ranks and batch (C9).

for batch in batches:
    one process
    for ranks in numbers of ranks:
        for strategy in data, spatial, filter, channel, hybrid, sharded, pipeline (for every number of chunks):
            the median of some steps, and the bytes that a rank sends

The published curves are of 200 classes, 64x64 images, 1 to 8 GPUs and batches of 16 to 2048; that is `--full`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from evener.errors import require
from evener.experiments.strategies_nodes import equal_nodes, numbers, require_gpus, where
from evener.experiments.strategies_report import Row, line, show, words
from evener.experiments.strategies_run import Cell, Network, time_cell
from evener.run.console import open_console, print_line
from evener.run.strategy import STRATEGIES, is_pipeline
from evener.schema import Part

DEFAULT = ("data", "spatial", "filter", "channel", "hybrid", "sharded", "pipeline")


class Sweep(Part, frozen=True, kw_only=True):
    """What is swept.

    Attributes:
        ranks: numbers of them.
        batches: samples of a step.
        strategies: names.
        chunks: numbers of micro-batches of pipelines.
    """

    ranks: tuple[int, ...]
    batches: tuple[int, ...]
    strategies: tuple[str, ...]
    chunks: tuple[int, ...]

    def cells(self) -> Iterator[Cell]:
        """In order; those that have too few samples for their ranks or chunks are left out."""
        for batch in self.batches:
            if 1 in self.ranks:
                yield Cell(strategy="serial", ranks=1, batch=batch)
            for ranks in self.ranks:
                for strategy in self.strategies if ranks > 1 else ():
                    for chunks in self.chunks if is_pipeline(strategy) else (1,):
                        cell = Cell(strategy=strategy, ranks=ranks, batch=batch, chunks=chunks)
                        if batch >= chunks * len(cell.rows):
                            yield cell


def resnet152_strategies(
    *,
    ranks: str | None,
    batch_size: str | None,
    chunks: str | None,
    strategies: str | None,
    steps: int | None,
    size: int,
    full: bool,
    output: Path,
    as_json: bool,
    network: Network | None = None,
) -> list[Row]:
    """Do the experiment; write `strategies.csv` and, where matplotlib is installed, curves into `output`.

    Args:
        ranks: numbers of them, such as 1,2,4.
        batch_size: batches, such as 16,64.
        chunks: micro-batches of pipelines, such as 2,8.
        strategies: names, separated by commas; by default `DEFAULT`.
        steps: to be timed in every cell.
        size: rows and columns of an image.
        full: as published, on eight GPUs.
        output: folder of table and curves.
        as_json: print the rows as the last line.
        network: another one than ResNet-152.

    Raises:
        InvalidInput: a word is wrong; nothing was started.
    """
    sweep = Sweep(
        ranks=numbers("--ranks", ranks or ("1,2,4,6,8" if full else "1,2")),
        batches=numbers("--batch-size", batch_size or ("16,64,256,1024,2048" if full else "8")),
        strategies=DEFAULT if strategies is None else _names(strategies),
        chunks=numbers("--chunks", chunks or ("2,4,8,16" if full else "4")),
    )
    most, steps = max(sweep.ranks), steps if steps is not None else (20 if full else 2)
    require(steps > 0, "--steps", steps, "positive")
    require(size > 0, "--size", size, "positive")
    require(output.is_dir() or not output.exists(), "--output", str(output), "a folder")
    if full:
        require_gpus("--ranks", most)
    network = network or Network(size=size)
    console, rows = open_console(as_json), list[Row]()
    for cell in sweep.cells():
        timing = time_cell(cell, network, equal_nodes(cell.ranks, most), steps)
        rows.append(Row(cell=cell, timing=timing))
        console.print(line(rows[-1]))
    show(rows, where(most), console, output)
    if as_json:
        print_line(json.dumps({"cells": [words(row, rows) for row in rows]}))
    return rows


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    allowed: Sequence[str] = [name for name in STRATEGIES if name != "auto"]
    for name in names:
        require(name in allowed, "--strategies", name, f"some of {', '.join(allowed)}")
    return names
