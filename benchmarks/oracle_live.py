"""The oracle against this machine: predicted and measured seconds of a training step, for every strategy and node set.

    python benchmarks/oracle_live.py [--networks plain,vgg,resnet] [--nodes 1/1,1/1,0.5] [--steps 10] [--csv FILE]

Each set of local nodes is started once. For every network and strategy the ranks plan exactly as `evener train
--strategy ...` does, which says what a step will take, and only then train; the median of the steps is what it took.
Data parallelism comes twice, first and last: how far the two medians differ is how far the machine itself drifts.
"""

from __future__ import annotations

import argparse
import copy
import csv
import gc
import json
import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
import torch

from evener.comm.group import leave_group
from evener.launch.nodes import parse_local_nodes
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local
from evener.oracle.apportion import Worker
from evener.parallel.parallel_model import Criterion
from evener.parallel.replicated import ReplicatedModel
from evener.plan import Plan
from evener.record import Step
from evener.run.config import RunConfig
from evener.run.context import RankContext, join_world, make_context
from evener.run.costs import measure_costs
from evener.run.loop import Loop
from evener.run.planning import divide, make_plan, shape_of
from evener.run.predict import predict
from evener.run.training import make_training

NETWORKS = ("plain", "vgg", "resnet")
NODES = ("1", "1,1", "1,0.5", "1,1,1", "1,0.5,0.5", "1,1,1,1")
ALONE = ("data",)
TOGETHER = ("data", "filter", "channel", "sharded", "spatial", "pipeline")
HYBRIDS = ("data+filter", "data+spatial")
WARM_UP = 2
CLOSE = 1.05
"""A choice is as good as the best if its step takes at most so many times as long."""


@dataclass(frozen=True)
class Cell:
    """One network on one set of nodes in one way; seconds of a step, all but the last two predicted."""

    network: str
    nodes: str
    strategy: str
    computing: float
    exchanging: float
    waiting: float
    predicted: float
    computed: float
    measured: float

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells it from others."""
        return self.network, self.nodes, self.strategy

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted / self.measured - 1


SECONDS = tuple(field.name for field in fields(Cell)[3:])


def strategies(size: int) -> tuple[str, ...]:
    """Those to compare on so many nodes."""
    return ALONE if size == 1 else TOGETHER if size == 2 else TOGETHER + HYBRIDS


def live_rank(env: RankEnvironment, order: dict[str, Any]) -> None:
    """One rank: every network in every way; the leader writes a row a cell."""
    world = join_world(env)
    speed = world.timer.pace.speed
    for network in order["networks"]:
        config = RunConfig(
            task=str(Path(__file__).with_name("oracle_live_task.py")),
            option={"network": network},
            output=Path(order["folder"]),
            epochs=1 + order["steps"],
        )
        context = make_context(env, world, config)
        workers = measure_costs(context, context.batch_size).workers
        ways = order["strategies"] or strategies(world.size)
        for strategy in (*ways, ways[0]):
            world.timer.pace.reference, world.timer.pace.speed = None, speed
            wanted = msgspec.structs.replace(config, strategy=strategy)
            mine = replace(context, model=copy.deepcopy(context.model))
            found = step_seconds(mine, wanted, order["steps"], workers)
            if world.is_leader:
                with Path(order["file"]).open("a") as file:
                    print(json.dumps([network, order["nodes"], strategy, *found]), file=file)
            gc.collect()
            world.barrier()
    leave_group()


def plan_cell(context: RankContext, config: RunConfig, workers: Sequence[Worker]) -> Plan:
    """The plan of the config's strategy; models are divided by `workers`."""
    if config.strategy == "data":
        return make_plan(context, config)
    nodes = context.env.nodes
    shape = shape_of(config, config.strategy, len(nodes), context.batch_size)
    return divide(shape, nodes, workers, context.batch_size)


def rehearse_alone(context: RankContext, plan: Plan) -> Plan:
    """`plan` of a single node, of which a run predicts nothing, with what its step will take."""
    arithmetic = context.arithmetic
    criterion = Criterion(loss=context.task.loss, autocast=arithmetic.autocast, scale=arithmetic.scaler.scale)
    return predict(context, plan, lambda silent: ReplicatedModel(copy.deepcopy(context.model), silent, criterion))


def step_seconds(context: RankContext, config: RunConfig, steps: int, workers: Sequence[Worker]) -> tuple[float, ...]:
    """Seconds of a step, as a Cell has them; what is predicted is known before the first step."""
    plan = plan_cell(context, config, workers)
    among = context.of_plan(plan)
    times, entries = [0.0], list[Any]()
    if among is not None:
        if context.group.size == 1:
            plan = rehearse_alone(context, plan)
        training = make_training(replace(among, env=replace(context.env, notify=entries.append)), plan, config)
        plan, loop = training.plan, Loop(training, config)
        loader = loop.loader(1)
        training.model.train()
        for step in range(1, WARM_UP + steps + 1):
            start = time.perf_counter()
            loop.one_step(step, loader)
            times.append(time.perf_counter() - start)
    context.group.barrier()
    said = plan.prediction
    assert said is not None
    (measured,) = context.group.all_reduce_max([median(times[WARM_UP + 1 :] or [0.0])])
    steps_done = [entry for entry in entries if isinstance(entry, Step)][WARM_UP:]
    computed = (
        median(max(n.io_seconds + n.compute_seconds + n.update_seconds for n in step.nodes) for step in steps_done)
        if steps_done
        else 0.0
    )
    return said.compute_seconds, said.communication_seconds, said.waiting_seconds, said.step_seconds, computed, measured


def cells_of(nodes: str, networks: Sequence[str], ways: Sequence[str], steps: int) -> list[Cell]:
    """All cells of one set of nodes, in processes that are started once."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "cells")
        order = {
            "networks": list(networks),
            "nodes": nodes,
            "strategies": list(ways),
            "steps": steps,
            "folder": folder,
            "file": str(file),
        }
        run_local(live_rank, parse_local_nodes(nodes), order, patience=600, on_event=print)
        return [Cell(*json.loads(line)) for line in file.read_text().splitlines()]


def split(cells: Sequence[Cell]) -> tuple[list[Cell], list[tuple[Cell, Cell]]]:
    """The cells, each once, and pairs of those that came twice."""
    first: dict[tuple[str, str, str], Cell] = {}
    pairs = [(first[cell.key], cell) for cell in cells if first.setdefault(cell.key, cell) is not cell]
    return list(first.values()), pairs


def show(cells: Sequence[Cell]) -> None:
    """Rows of the table, in milliseconds; predicted = computing of the slowest rank + exchanging + waiting."""
    for cell in cells:
        numbers = (f"{1e3 * getattr(cell, name):10.1f}" for name in SECONDS)
        print(f"{cell.network:8} {cell.nodes:16} {cell.strategy:14}", *numbers, f"{cell.error:+7.1%}", flush=True)


def report(cells: Sequence[Cell]) -> None:
    """How far predictions are off, the worst cells, and how well the oracle chose."""
    cells, again = split(cells)
    drifts = [abs(one.measured / other.measured - 1) for one, other in again]
    print(f"\nthe same cell measured twice differs by {fmean(drifts):.1%} in the mean, {max(drifts):.1%} at most")
    print(f"mean absolute error of {len(cells)} cells: {fmean(abs(cell.error) for cell in cells):.1%}")
    for strategy in dict.fromkeys(cell.strategy for cell in cells):
        own = [cell.error for cell in cells if cell.strategy == strategy]
        print(f"  {strategy:14} {fmean(map(abs, own)):6.1%}   (mean {fmean(own):+.1%})")
    print("worst: ", end="")
    worst = sorted(cells, key=lambda cell: -abs(cell.error))[:5]
    print("; ".join(f"{cell.network} on {cell.nodes}, {cell.strategy} {cell.error:+.0%}" for cell in worst))
    cases = list(dict.fromkeys((cell.network, cell.nodes) for cell in cells))
    good = 0
    for case in cases:
        mine = [cell for cell in cells if cell.key[:2] == case]
        chosen, best = min(mine, key=lambda cell: cell.predicted), min(mine, key=lambda cell: cell.measured)
        good += chosen.measured <= CLOSE * best.measured
        if chosen.measured > CLOSE * best.measured:
            print(f"  chose {chosen.strategy} on {case}: {chosen.measured / best.measured:.2f} times {best.strategy}")
    print(f"the oracle's first is the fastest, or within {CLOSE - 1:.0%} of it, in {good} of {len(cases)} cases")


def main() -> None:
    """Measure on this machine, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--nodes", default="/".join(NODES), help="sets of local nodes, between slashes")
    parser.add_argument("--strategies", default="", help="by default all that go with the number of nodes")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--csv", type=Path)
    words = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, PyTorch {torch.__version__}"
    )
    print(f"{'network':8} {'nodes':16} {'strategy':14}", *(f"{name:>10}" for name in SECONDS), "  error")
    cells: list[Cell] = []
    ways = words.strategies.split(",") if words.strategies else []
    for nodes in words.nodes.split("/"):
        found = cells_of(nodes, words.networks.split(","), ways, words.steps)
        show(found)
        cells += found
    report(cells)
    if words.csv is not None:
        with words.csv.open("w", newline="") as file:
            csv.writer(file).writerows([[field.name for field in fields(Cell)], *map(astuple, cells)])


if __name__ == "__main__":
    main()
