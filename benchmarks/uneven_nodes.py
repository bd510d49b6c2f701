"""Speed-up of uneven shares over the fastest node alone, and over equal shares; ways in turn, so that drift cancels.

    python benchmarks/uneven_nodes.py [--speeds 1.0,0.5,0.25] [--rounds 3] [--task synthetic]

Prints for every round the median step of each way, and at the end the median of the rounds' ratios beside the ideal.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from evener.events import RunEvent
from evener.launch.nodes import LocalNode, parse_local_nodes
from evener.launch.ranks import run_local
from evener.record import TrainRecord
from evener.run.config import RunConfig
from evener.run.rank import train_rank

WARM_UP = 8
"""Steps left out: the first ones allocate memory."""


def run(
    task: str,
    options: dict[str, str],
    nodes: list[LocalNode],
    shares: str,
    epochs: int,
    batch_size: int | None = None,
) -> TrainRecord:
    """The record of one run."""
    records: list[TrainRecord] = []

    def keep(word: RunEvent) -> None:
        if isinstance(word, TrainRecord):
            records.append(word)

    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            task=task, option=options, output=Path(folder), shares=shares, epochs=epochs, batch_size=batch_size
        )
        run_local(train_rank, nodes, config, patience=60, on_event=keep)
    return records[0]


def seconds_per_sample(record: TrainRecord) -> float:
    """Median over the full steps after the warm-up."""
    steps = [s for s in record.steps[WARM_UP:] if s.samples == record.plan.batch_size]
    return median(s.seconds / s.samples for s in steps)


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speeds", default="1.0,0.5,0.25")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--task", default="synthetic")
    parser.add_argument("--option", action="append", default=[])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int)
    words = parser.parse_args()
    options = dict(item.split("=", 1) for item in words.option)
    nodes = parse_local_nodes(words.speeds)
    best = max(nodes, key=lambda node: node.speed_at(0))
    ideal = sum(node.speed_at(0) for node in nodes) / best.speed_at(0)
    ratios: dict[str, list[float]] = {"evener": [], "equal": []}

    def once(team: list[LocalNode], shares: str) -> TrainRecord:
        return run(words.task, options, team, shares, words.epochs, words.batch_size)

    for i in range(words.rounds):
        before = seconds_per_sample(once([best], "measured"))
        ours = once(nodes, "measured")
        after = seconds_per_sample(once([best], "measured"))
        equal = seconds_per_sample(once(nodes, "equal"))
        alone = (before + after) / 2
        ratios["evener"].append(alone / seconds_per_sample(ours))
        ratios["equal"].append(after / equal)
        waiting = ", ".join(f"{n.name} {n.seconds_waiting / ours.seconds:.0%}" for n in ours.nodes)
        print(
            f"round {i + 1}: alone {before * 1e3:.3f} and {after * 1e3:.3f} ms a sample, evener "
            f"{ratios['evener'][-1]:.3f}x, equal shares {ratios['equal'][-1]:.3f}x; waiting: {waiting}",
            flush=True,
        )
    for way, values in ratios.items():
        middle = median(values)
        print(f"{way}: {middle:.3f}x the fastest node alone, {middle / ideal:.1%} of the ideal {ideal:.2f}x")


if __name__ == "__main__":
    main()
