"""A program with Evener's lines: on equal nodes against DistributedDataParallel, on uneven ones against their sum.

    python benchmarks/own_program.py [--blocks 8] [--steps 8] [--rounds 2] [--speeds 1.0,0.5,0.25] [--idle-ms 0.4]

Equal: two ranks, one core each, in turn within one run; loading, reports and re-balancing included. Uneven: the seconds
of the last steps, when shares have settled, against the fastest node alone; and the seconds that the comparison
before the first step took. With `--idle-ms` a sample waits in the place of computing: what is left then is what shares,
re-balancing and exchanges cost, also on a machine that others keep busy.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from own_program_script import make_data, make_model
from results import Results, open_results, parser_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from turns import in_turn, ratios, seconds_of

from evener.comm.group import Group
from evener.experiments.local_ranks import measure_ranks
from evener.frontends.programs.options import ScriptConfig
from evener.frontends.programs.run import Run
from evener.frontends.programs.script import perform_script
from evener.launch.nodes import NodeSpec, parse_local_nodes
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local
from evener.records.events import RunEvent
from evener.records.record import TrainRecord

Step = Callable[[], object]
SCRIPT = Path(__file__).parent / "own_program_script.py"


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> Step:
    """A step of an ordinary loop."""
    batches = itertools.chain.from_iterable(itertools.repeat(loader))

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()

    return step


def plain_step(group: Group, batch: int) -> Step:
    """Of DistributedDataParallel."""
    data, model = make_data(batch * 10), DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    sampler: DistributedSampler[Any] = DistributedSampler(data, group.size, group.rank)
    return step_of(model, sgd(model), DataLoader(data, batch // group.size, sampler=sampler))


def prepared_step(env: RankEnvironment, group: Group, batch: int) -> Step:
    """Of a program with `run.prepare`."""
    run = Run(env, group, ScriptConfig(script=SCRIPT, shares="equal"))
    run.equivalence_check.is_wanted = False
    model = make_model()
    return step_of(*run.prepare(model, sgd(model), DataLoader(make_data(batch * 10), batch, shuffle=True)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser of both."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def block_seconds(words: dict[str, Any], env: RankEnvironment, group: Group) -> dict[str, list[list[float]]]:
    """One rank: seconds of every step of both ways, by blocks."""
    steps = {"plain": plain_step(group, words["batch"]), "evener": prepared_step(env, group, words["batch"])}

    def block(step: Step) -> list[float]:
        group.barrier()
        return [seconds_of(step) for _ in range(words["steps"])]

    return in_turn({way: partial(block, step) for way, step in steps.items()}, words["blocks"])


def record_of(nodes: list[NodeSpec], *words: str) -> TrainRecord:
    """The record of the program, with its `words`, on `nodes`."""
    records: list[TrainRecord] = []

    def keep(word: RunEvent) -> None:
        if isinstance(word, TrainRecord):
            records.append(word)

    with tempfile.TemporaryDirectory() as folder:
        config = ScriptConfig(script=SCRIPT, run_folder=Path(folder), arguments=words)
        run_local(perform_script, nodes, config, patience=60, on_event=keep)
    return records[0]


def settled(record: TrainRecord) -> float:
    """Median seconds of the later half of the steps."""
    return median(step.seconds for step in record.steps[len(record.steps) // 2 :])


def uneven(results: Results, speeds: str, rounds: int, *words: str) -> None:
    """Speed-up over the fastest node alone."""
    nodes = parse_local_nodes(speeds)
    best = max(nodes, key=lambda node: node.speed_at(0))
    ideal = sum(node.speed_at(0) for node in nodes) / best.speed_at(0)
    for _ in range(rounds):
        alone, together = record_of([best], *words), record_of(nodes, *words)
        check = together.plan.check
        results.add(
            "nodes {speeds}: {speed_up:.2f} times the fastest alone, {part:.0%} of {ideal:.2f}; "
            "compared in {check:.2f} s",
            speeds=speeds,
            speed_up=settled(alone) / settled(together),
            part=settled(alone) / settled(together) / ideal,
            ideal=ideal,
            check=check.seconds if check else 0.0,
        )


def main() -> None:
    """Equal nodes, then uneven ones."""
    parser = parser_of(__doc__)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch", type=int, default=224)
    parser.add_argument("--speeds", default="1.0,0.5,0.25")
    parser.add_argument("--idle-ms", type=float, default=0.0, help="that a sample waits, on uneven nodes alone")
    words = parser.parse_args()
    with open_results(words) as results:
        blocks = measure_ranks(
            parse_local_nodes("1,1"), partial(block_seconds, vars(words)), dict[str, list[list[float]]]
        )
        plain, evener = (median(itertools.chain(*blocks[way])) for way in ("plain", "evener"))
        results.add(
            "equal nodes: plain {plain_ms:.1f} ms, evener {evener_ms:.1f} ms a step; ratio of medians {ratio:.3f}, "
            "median of the blocks' ratios {blocks:.3f}",
            plain_ms=plain * 1e3,
            evener_ms=evener * 1e3,
            ratio=evener / plain,
            blocks=ratios(*([median(block) for block in blocks[way]] for way in ("evener", "plain"))),
        )
        given = ("--batch", str(words.batch), "--idle-ms", str(words.idle_ms))
        uneven(results, words.speeds, words.rounds, *given)


if __name__ == "__main__":
    import_module("own_program").main()  # ranks import what is defined here
