"""The oracle against this machine: predicted and measured seconds of a training step, for every strategy and node set.

    python benchmarks/oracle_live.py [--networks plain,vgg] [--nodes 1/1,1/1,0.5] [--steps 10] [--formulas] [--json]

Each set of local nodes is started once. For every network and strategy the ranks plan exactly as `evener train
--strategy ...` does, which says what a step will take, and only then train; the median of the steps is what it took.
Data parallelism comes twice, first and last: how far the two medians differ is how far the machine itself drifts.
With `--formulas`, `evener benchmark` measures each set of nodes afterwards, and every cell is also predicted from this
profile alone, as `evener plan` does: no step of the network is rehearsed.
"""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
from results import Results, open_results, parser_of
from torch import Tensor
from turns import seconds_of

from evener.benchmark.dry_run import LiveBytes
from evener.comm.group import Group
from evener.config.run_config import RunConfig
from evener.data.tasks.load import load_task
from evener.experiments.local_ranks import measure_ranks
from evener.experiments.results import write_csv
from evener.launch.nodes import parse_local_nodes
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.apportion import NodeCost
from evener.oracle.cost.model import CostEstimate, CostModel, TrainingJob
from evener.oracle.search import estimates_on
from evener.parallel.parallel_model import Criterion
from evener.parallel.replicated import ReplicatedModel
from evener.records.plan import Plan
from evener.records.profile import ClusterProfile
from evener.records.record import Step
from evener.records.schema import read_noun
from evener.tracer.model_graph import trace_model_graph
from evener.training.context import RankContext, make_context
from evener.training.costs import measure_costs
from evener.training.loop import Loop
from evener.training.planning import divide, make_plan, shape_of
from evener.training.predict import predict
from evener.training.training import make_training

NETWORKS = ("plain", "vgg", "resnet")
NODES = ("1", "1,1", "1,0.5", "1,1,1", "1,0.5,0.5", "1,1,1,1")
TASK = Path(__file__).with_name("oracle_live_task.py")
ALONE = ("data",)
TOGETHER = ("data", "filter", "channel", "sharded", "spatial", "pipeline")
HYBRIDS = ("data+filter", "data+spatial")
WARM_UP = 2
CLOSE = 1.05
"""A choice is as good as the best if its step takes at most so many times as long."""


@dataclass(frozen=True)
class Cell:
    """One network on one set of nodes in one way; seconds of a step, all but the last two predicted.

    `formulas` is predicted from a profile of the machine alone; 0 if that was not tried. `fitted` and `held` are the
    predicted and the counted bytes at the peak of a step, on the rank that has most of them.
    """

    network: str
    nodes: str
    strategy: str
    computing: float
    exchanging: float
    waiting: float
    predicted: float
    formulas: float
    computed: float
    measured: float
    held: float
    fitted: float = 0.0

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells it from others."""
        return self.network, self.nodes, self.strategy

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted / self.measured - 1

    @property
    def memory_error(self) -> float:
        """Of the predicted memory, relative to what was counted."""
        return self.fitted / self.held - 1

    @property
    def formulas_error(self) -> float:
        """Of the prediction from the profile alone."""
        return self.formulas / self.measured - 1


SECONDS = tuple(field.name for field in fields(Cell)[3:-2])


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
                task=str(TASK),
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
    times, entries, held = [0.0], list[Any](), 0.0
    others = live_tensors()  # they stay alive, so that no other tensor is in their place
    if among is not None:
        if context.group.size == 1:
            plan = rehearse_alone(context, plan)
        training = make_training(replace(among, env=replace(context.env, notify=entries.append)), plan, config)
        plan, loop = training.plan, Loop(training, config)
        loader = loop.loader(1)
        training.model.train()
        times += [seconds_of(partial(loop.one_step, step, loader)) for step in range(1, WARM_UP + steps + 1)]
        gc.collect()
        held = bytes_besides(others, [*training.model.parameters(), *training.model.buffers()])
        with LiveBytes() as live:
            loop.one_step(WARM_UP + steps + 1, loader)
        held += live.peak
    context.group.barrier()
    said = plan.prediction
    assert said is not None
    measured, held = context.group.all_reduce_max([median(times[WARM_UP + 1 :] or [0.0]), held])
    steps_done = [entry for entry in entries if isinstance(entry, Step)][WARM_UP:]
    computed = (
        median(max(n.io_seconds + n.compute_seconds + n.update_seconds for n in step.nodes) for step in steps_done)
        if steps_done
        else 0.0
    )
    parts = (said.compute_seconds, said.communication_seconds, said.waiting_seconds)
    return *parts, said.step_seconds, 0.0, computed, measured, held


def live_tensors() -> list[Tensor]:
    """All tensors that Python can reach; those of the device `meta` have no memory."""
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    return [tensor for tensor in tensors if tensor.device.type != "meta"]


def bytes_besides(others: Sequence[Tensor], trained: Sequence[Tensor]) -> float:
    """Bytes of all tensors but `others`; those that are trained count."""
    own = {tensor.untyped_storage()._cdata for tensor in trained}
    known = {tensor.untyped_storage()._cdata for tensor in others} - own
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in live_tensors()}
    return float(sum(nbytes for place, nbytes in storages.items() if place not in known))


def cells_of(nodes: str, networks: Sequence[str], ways: Sequence[str], steps: int) -> list[Cell]:
    """All cells of one set of nodes, in processes that are started once."""
    program = partial(live_rank, nodes, list(networks), list(ways), steps)
    return measure_ranks(parse_local_nodes(nodes), program, list[Cell])


def with_formulas(cells: Sequence[Cell], folder: Path) -> list[Cell]:
    """The cells of one set of nodes, also predicted from a profile that `evener benchmark` writes now."""
    file = folder / "cluster.json"
    typed = [sys.executable, "-m", "evener", "benchmark", "--local-nodes", cells[0].nodes, "--output", str(file)]
    subprocess.run(typed, check=True, capture_output=True)
    profile = read_noun(file, ClusterProfile)
    pairs = [(cell, from_profile(cell, profile)) for cell in cells]
    return [
        cell if one is None else replace(cell, formulas=one.step_seconds, fitted=float(one.peak_bytes))
        for cell, one in pairs
    ]


def from_profile(cell: Cell, profile: ClusterProfile) -> CostEstimate | None:
    """Predict a step of the cell on all devices of the profile; None for a mesh that the oracle does not try."""
    task = load_task(str(TASK), None, {"network": cell.network})
    inputs, _ = task.train_data()[0]
    graph = trace_model_graph(task.model(), inputs.unsqueeze(0), task.name)
    job = TrainingJob(graph=graph, batch_size=task.batch_size)
    strategy: Any = cell.strategy if len(profile.devices) > 1 else "serial"
    estimates, _ = estimates_on(CostModel(job, profile), strategy, range(len(profile.devices)))
    return min(estimates, key=lambda estimate: estimate.step_seconds, default=None)


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
    if priced := [cell for cell in cells if cell.formulas]:
        report_formulas(results, priced)
    worst = sorted(cells, key=lambda cell: -abs(cell.error))[:5]
    named = (f"{cell.network} on {cell.nodes}, {cell.strategy} {cell.error:+.0%}" for cell in worst)
    results.say("worst: " + "; ".join(named))


def report_formulas(results: Results, cells: Sequence[Cell]) -> None:
    """How far predictions without a rehearsal are off."""
    results.add(
        "from the profile alone: {error:.1%}, worst {worst:+.0%}",
        what="mean absolute error of formulas",
        error=fmean(abs(cell.formulas_error) for cell in cells),
        worst=max((cell.formulas_error for cell in cells), key=abs),
    )
    results.add(
        "memory: {error:.1%}, {least:+.0%} to {most:+.0%}",
        what="mean absolute error of predicted memory",
        error=fmean(abs(cell.memory_error) for cell in cells),
        least=min(cell.memory_error for cell in cells),
        most=max(cell.memory_error for cell in cells),
    )
    for name, of in (("strategy", 2), ("network", 0), ("nodes", 1)):
        for one in dict.fromkeys(cell.key[of] for cell in cells):
            own = [cell.formulas_error for cell in cells if cell.key[of] == one]
            results.add(
                "  {one:14} {error:6.1%}   (mean {bias:+.1%}); memory, mean {memory:+.1%}",
                what=f"mean absolute error of formulas, by {name}",
                one=one,
                error=fmean(map(abs, own)),
                bias=fmean(own),
                memory=fmean(cell.memory_error for cell in cells if cell.key[of] == one),
            )


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
    parser.add_argument("--formulas", action="store_true", help="also predict from a profile of the nodes alone")
    parser.add_argument("--csv", type=Path)
    words = parser.parse_args()
    cells: list[Cell] = []
    ways = words.strategies.split(",") if words.strategies else []
    with open_results(words) as results:
        results.say(HEAD)
        for nodes in words.nodes.split("/"):
            found = cells_of(nodes, words.networks.split(","), ways, words.steps)
            if words.formulas:
                with tempfile.TemporaryDirectory() as folder:
                    found = with_formulas(found, Path(folder))
            show(results, found)
            cells += found
        report_errors(results, cells)
        report_choices(results, cells)
        if words.csv is not None:
            write_csv([asdict(cell) for cell in cells], words.csv)


if __name__ == "__main__":
    main()
