"""The oracle against this machine: predicted and measured seconds of a training step, for every strategy and node set.

    python benchmarks/oracle_live.py [--networks plain,vgg] [--nodes 1/1,1/1,0.5] [--steps 10] [--csv FILE] [--json]

Each set of local nodes is started once. For every network and strategy the ranks plan exactly as `evener train
--strategy ...` does, which says what a step will take, and only then train; the median of the steps is what it took.
Data parallelism comes twice, first and last: how far the two medians differ is how far the machine itself drifts.
"""

from __future__ import annotations

import copy
import gc
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
from results import Results, open_results, parser_of
from turns import seconds_of

from evener.comm.group import Group
from evener.config.run_config import RunConfig
from evener.experiments.local_ranks import measure_ranks
from evener.experiments.results import write_csv
from evener.launch.nodes import parse_local_nodes
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.apportion import NodeCost
from evener.parallel.parallel_model import Criterion
from evener.parallel.replicated import ReplicatedModel
from evener.records.plan import Plan
from evener.records.record import Step
from evener.training.context import RankContext, make_context
from evener.training.costs import measure_costs
from evener.training.loop import Loop
from evener.training.planning import divide, make_plan, shape_of
from evener.training.predict import predict
from evener.training.training import make_training

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


def live_rank(
    nodes: str, networks: Sequence[str], ways: Sequence[str], steps: int, env: RankEnvironment, world: Group
) -> list[Cell]:
    """One rank: every network in every way."""
    speed, cells = world.timer.pace.speed, list[Cell]()
    with tempfile.TemporaryDirectory() as folder:
        for network in networks:
            config = RunConfig(
                task=str(Path(__file__).with_name("oracle_live_task.py")),
                option={"network": network},
                output=Path(folder),
                epochs=1 + steps,
            )
            context = make_context(env, world, config)
            workers = measure_costs(context, context.batch_size).workers
            own = ways or strategies(world.size)
            for strategy in (*own, own[0]):
                world.timer.pace.reference, world.timer.pace.speed = None, speed
                wanted = msgspec.structs.replace(config, strategy=strategy)
                mine = replace(context, model=copy.deepcopy(context.model))
                cells.append(Cell(network, nodes, strategy, *step_seconds(mine, wanted, steps, workers)))
                gc.collect()
                world.barrier()
    return cells


def plan_cell(context: RankContext, config: RunConfig, workers: Sequence[NodeCost]) -> Plan:
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


def step_seconds(context: RankContext, config: RunConfig, steps: int, workers: Sequence[NodeCost]) -> tuple[float, ...]:
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
        times += [seconds_of(partial(loop.one_step, step, loader)) for step in range(1, WARM_UP + steps + 1)]
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
    program = partial(live_rank, nodes, list(networks), list(ways), steps)
    return measure_ranks(parse_local_nodes(nodes), program, list[Cell])


def split(cells: Sequence[Cell]) -> tuple[list[Cell], list[tuple[Cell, Cell]]]:
    """The cells, each once, and pairs of those that came twice."""
    first: dict[tuple[str, str, str], Cell] = {}
    pairs = [(first[cell.key], cell) for cell in cells if first.setdefault(cell.key, cell) is not cell]
    return list(first.values()), pairs


MS = {name: f"{name}_ms" for name in SECONDS}
HEAD = f"{'network':8} {'nodes':16} {'strategy':14} " + " ".join(f"{name:>10}" for name in SECONDS) + "   error"
ROW = "{network:8} {nodes:16} {strategy:14} " + " ".join(f"{{{ms}:10.1f}}" for ms in MS.values()) + " {error:+7.1%}"


def show(results: Results, cells: Sequence[Cell]) -> None:
    """Rows of the table, in milliseconds; predicted = computing of the slowest rank + exchanging + waiting."""
    for cell in cells:
        whose = {"network": cell.network, "nodes": cell.nodes, "strategy": cell.strategy}
        results.add(ROW, **whose, **{ms: 1e3 * getattr(cell, name) for name, ms in MS.items()}, error=cell.error)


def report_errors(results: Results, every: Sequence[Cell]) -> None:
    """How far predictions are off, and the worst cells."""
    cells, again = split(every)
    drifts = [abs(one.measured / other.measured - 1) for one, other in again]
    results.add(
        "\nthe same cell measured twice differs by {mean:.1%} in the mean, {most:.1%} at most",
        what="drift",
        mean=fmean(drifts),
        most=max(drifts),
    )
    whole = fmean(abs(cell.error) for cell in cells)
    results.add(
        "mean absolute error of {cells} cells: {error:.1%}", what="mean absolute error", cells=len(cells), error=whole
    )
    for strategy in dict.fromkeys(cell.strategy for cell in cells):
        own = [cell.error for cell in cells if cell.strategy == strategy]
        results.add(
            "  {strategy:14} {error:6.1%}   (mean {bias:+.1%})",
            what="mean absolute error",
            strategy=strategy,
            error=fmean(map(abs, own)),
            bias=fmean(own),
        )
    worst = sorted(cells, key=lambda cell: -abs(cell.error))[:5]
    named = (f"{cell.network} on {cell.nodes}, {cell.strategy} {cell.error:+.0%}" for cell in worst)
    results.say("worst: " + "; ".join(named))


def report_choices(results: Results, every: Sequence[Cell]) -> None:
    """How well the oracle chose."""
    cells, _ = split(every)
    cases = list(dict.fromkeys((cell.network, cell.nodes) for cell in cells))
    good = 0
    for case in cases:
        mine = [cell for cell in cells if cell.key[:2] == case]
        chosen, best = min(mine, key=lambda cell: cell.predicted), min(mine, key=lambda cell: cell.measured)
        good += chosen.measured <= CLOSE * best.measured
        if chosen.measured > CLOSE * best.measured:
            ratio = chosen.measured / best.measured
            results.say(f"  chose {chosen.strategy} on {case}: {ratio:.2f} times {best.strategy}")
    results.add(
        "the oracle's first is the fastest, or within {close:.0%} of it, in {good} of {cases} cases",
        what="choices",
        close=CLOSE - 1,
        good=good,
        cases=len(cases),
    )


def main() -> None:
    """Measure on this machine, print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--nodes", default="/".join(NODES), help="sets of local nodes, between slashes")
    parser.add_argument("--strategies", default="", help="by default all that go with the number of nodes")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--csv", type=Path)
    words = parser.parse_args()
    cells: list[Cell] = []
    ways = words.strategies.split(",") if words.strategies else []
    with open_results(words) as results:
        results.say(HEAD)
        for nodes in words.nodes.split("/"):
            found = cells_of(nodes, words.networks.split(","), ways, words.steps)
            show(results, found)
            cells += found
        report_errors(results, cells)
        report_choices(results, cells)
        if words.csv is not None:
            write_csv([asdict(cell) for cell in cells], words.csv)


if __name__ == "__main__":
    main()
