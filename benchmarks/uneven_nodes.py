"""Speed-up of uneven shares over the fastest node alone, and over equal shares; ways in turn, so that drift cancels.

    python benchmarks/uneven_nodes.py [--speeds 1.0,0.5,0.25] [--rounds 3] [--task synthetic] [--json]

Prints for every round the median step of each way, and at the end the median of the rounds' ratios beside the ideal.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

from results import Results, open_results, parser_of

from evener.config.run_config import RunConfig
from evener.launch.nodes import NodeSpec, parse_local_nodes
from evener.launch.ranks import run_local
from evener.records.errors import require
from evener.records.events import RunEvent
from evener.records.record import TrainRecord
from evener.training.rank import train_rank

WARM_UP = 8
"""Steps left out: the first ones allocate memory."""


def run(
    task: str,
    options: dict[str, str],
    nodes: list[NodeSpec],
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
    require(bool(steps), "--epochs", record.epochs, f"enough for full steps after the {WARM_UP} that warm up")
    return median(s.seconds / s.samples for s in steps)


def main() -> None:
    """The rounds, and what came of them."""
    parser = parser_of(__doc__)
    parser.add_argument("--speeds", default="1.0,0.5,0.25")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--task", default="synthetic")
    parser.add_argument("--option", action="append", default=[])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int)
    words = parser.parse_args()
    with open_results(words) as results:
        nodes = parse_local_nodes(words.speeds)
        best = max(nodes, key=lambda node: node.speed_at(0))
        ideal = sum(node.speed_at(0) for node in nodes) / best.speed_at(0)
        found = [one_round(results, number, nodes, best) for number in range(1, words.rounds + 1)]
        for way, values in zip(("evener", "equal shares"), zip(*found, strict=True), strict=True):
            middle = median(values)
            results.add(
                "{way}: {speed_up:.3f}x the fastest node alone, {of_ideal:.1%} of the ideal {ideal:.2f}x",
                way=way,
                speed_up=middle,
                of_ideal=middle / ideal,
                ideal=ideal,
            )


def one_round(results: Results, number: int, nodes: list[NodeSpec], best: NodeSpec) -> tuple[float, float]:
    """Speed-ups over the best node alone, by our shares and by equal ones; the one alone runs before and after ours."""
    words = results.options
    options = dict(item.split("=", 1) for item in words.option)

    def once(team: list[NodeSpec], shares: str) -> TrainRecord:
        return run(words.task, options, team, shares, words.epochs, words.batch_size)

    before = seconds_per_sample(once([best], "measured"))
    ours = once(nodes, "measured")
    after = seconds_per_sample(once([best], "measured"))
    equal = after / seconds_per_sample(once(nodes, "equal"))
    speed_up = (before + after) / 2 / seconds_per_sample(ours)
    waiting = {node.name: node.seconds_waiting / ours.seconds for node in ours.nodes}
    results.add(
        "round {number}: alone {before_ms:.3f} and {after_ms:.3f} ms a sample, evener {speed_up:.3f}x, equal shares "
        "{equal:.3f}x; waiting: " + ", ".join(f"{name} {share:.0%}" for name, share in waiting.items()),
        number=number,
        before_ms=before * 1e3,
        after_ms=after * 1e3,
        speed_up=speed_up,
        equal=equal,
        waiting=waiting,
    )
    return speed_up, equal


if __name__ == "__main__":
    main()
