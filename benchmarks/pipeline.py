"""Evener's pipeline against PyTorch's own and against the ideal; what it holds in memory is in pipeline_memory.py.

    python benchmarks/pipeline.py overhead       # K=2: a step, relative to torch.distributed.pipelining's
    python benchmarks/pipeline.py bubble         # idle share of stages that wait, against (K-1) / (M+K-1)
    python benchmarks/pipeline.py uneven         # speeds 1 and 1/2: stages chosen for them against equal ones

Ratios are medians of rounds in which the ways took turns. All three take --rounds and --json.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import product
from statistics import median
from typing import Any, NamedTuple, get_args

import torch
import torch.nn.functional as F
from results import Results, open_results, parser_of
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from turns import in_turn, ratios, seconds_of

from evener.comm.group import Group
from evener.experiments.local_ranks import measure_on
from evener.experiments.models.resnet import resnet152
from evener.launch.nodes import NodeSpec
from evener.oracle.schedule import ScheduleChoice, ScheduleName, bubble
from evener.parallel.pipeline.pipeline import Pipeline

CPU = torch.device("cpu")
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
PUBLISHED: tuple[ScheduleName, ...] = ("gpipe", "1f1b")
"""Schedules that PyTorch has as well, with an idle share of (K-1) / (M+K-1)."""
UNEVEN_MICRO_BATCHES = 16


def unpinned(*speeds: float) -> list[NodeSpec]:
    """A node of one thread for each speed, on whichever core is free."""
    return [NodeSpec(name=f"n{i}", speeds=((0, speed),), threads=1) for i, speed in enumerate(speeds)]


def timed(group: Group, ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every way in every round, until all ranks are done."""

    def until_done(way: Callable[[], object]) -> None:
        way()
        group.barrier()

    def together(way: Callable[[], object]) -> float:
        group.barrier()
        return seconds_of(partial(until_done, way))

    return in_turn({name: partial(together, way) for name, way in ways.items()}, rounds)


def resnet() -> tuple[nn.Sequential, Tensor, Tensor, Callable[[Any, Any], Tensor], int]:
    """A small ResNet of eight segments, a batch, and the segment that the second stage begins with."""
    torch.manual_seed(0)
    model = resnet152(10, width=16, depths=(2, 2, 4, 2))
    return model, torch.randn(32, 3, 64, 64), torch.randint(0, 10, (32,)), F.cross_entropy, 3


def encoder() -> tuple[nn.Sequential, Tensor, Tensor, Callable[[Any, Any], Tensor], int]:
    """A Transformer's encoder, a batch of tokens, and the layer that the second stage begins with."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(128, 4, 256, 0.0, batch_first=True) for _ in range(8)]
    model = nn.Sequential(nn.Embedding(1000, 128), *layers, nn.Linear(128, 10))

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return model, torch.randint(0, 1000, (32, 32)), torch.randint(0, 10, (32, 32)), loss, 5


TASKS = {"resnet": resnet, "encoder": encoder}


def beside_pytorch(task: str, schedule: ScheduleName, rounds: int, group: Group) -> dict[str, list[float]]:
    """One of two ranks: seconds of the same cut, schedule and micro-batches, by PyTorch and by Evener, in turn."""
    micro_batches = 8
    model, x, y, loss, cut = TASKS[task]()
    stage = (model[:cut], model[cut:])[group.rank]
    sample = x[: len(x) // micro_batches]
    with torch.no_grad():
        middle = model[:cut].eval()(sample)
        final = model[cut:].eval()(middle)
    model.train()
    given, made = ((sample,), (middle.requires_grad_(),)) if group.is_leader else ((middle.requires_grad_(),), (final,))
    theirs = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule](
        PipelineStage(stage, group.rank, 2, CPU, input_args=given, output_args=made), micro_batches, loss_fn=loss
    )
    own_model = TASKS[task]()[0]
    begins = [next(n for i, (n, _) in enumerate(own_model.named_children()) if i == cut)]
    ours = Pipeline(
        own_model, x, loss, stages=begins, micro_batches=micro_batches, on=group, schedule=schedule,
        rematerialise="never",
    )  # fmt: skip

    def by_pytorch() -> None:
        for parameter in stage.parameters():
            parameter.grad = None
        theirs.step(x) if group.is_leader else theirs.step(target=y)

    def by_evener() -> None:
        for parameter in ours.parameters():
            parameter.grad = None
        ours.step(x, y)

    return timed(group, {"pytorch": by_pytorch, "evener": by_evener}, rounds)


def overhead(results: Results) -> None:
    """A step of two ranks, relative to PyTorch's."""
    for task, schedule in product(TASKS, PUBLISHED):
        program = partial(beside_pytorch, task, schedule, results.options.rounds)
        seconds = measure_on(unpinned(1.0, 1.0), program, dict[str, list[float]])
        results.add(
            "{task:8} {schedule:6} pytorch {pytorch_ms:.1f} ms, evener {evener_ms:.1f} ms; "
            "median of the rounds' ratios {ratio.median:.3f}",
            benchmark="overhead",
            task=task,
            schedule=schedule,
            pytorch_ms=median(seconds["pytorch"]) * 1e3,
            evener_ms=median(seconds["evener"]) * 1e3,
            ratio=ratios(seconds["evener"], seconds["pytorch"]),
        )


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(0 if x.is_meta else seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Wait(nn.Module):
    """Waits instead of computing, in both passes."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """`x`, later."""
        outputs: Tensor = _Wait.apply(x * self.weight, self.seconds)  # type: ignore[no-untyped-call]
        return outputs


def idle_share(micro_batches: int, schedule: ScheduleName, group: Group) -> float:
    """One rank that waits: the median idle share of three steps."""
    x = torch.zeros(micro_batches, 3)
    model, begins = nn.Sequential(*(Wait(0.03) for _ in range(group.size))), [str(i) for i in range(1, group.size)]
    pipeline = Pipeline(
        model, x, F.mse_loss, stages=begins, on=group, schedule=schedule, micro_batches=micro_batches,
        rematerialise="never",
    )  # fmt: skip
    shares = []
    for _ in range(3):
        pipeline.step(x, x)
        shares.append(pipeline.timeline().bubble)
    return median(shares)


IDLE = "K={stages} M={micro_batches:2} {schedule:6} measured {measured:.3f}, paper {paper:.3f}"
WAITING = tuple(product((1, 4, 16), PUBLISHED))


def idle_shares(group: Group) -> list[float]:
    """One rank that waits: of every number of micro-batches and schedule."""
    return [idle_share(micro_batches, schedule, group) for micro_batches, schedule in WAITING]


def bubbles(results: Results) -> None:
    """Two and four ranks that wait."""
    for stages in (2, 4):
        found = measure_on(unpinned(*[1.0] * stages), idle_shares, list[float])
        for (micro_batches, schedule), measured in zip(WAITING, found, strict=True):
            cell = {"stages": stages, "micro_batches": micro_batches, "schedule": schedule}
            results.add(IDLE, benchmark="bubble", **cell, measured=measured, paper=bubble(stages, micro_batches))


class Unevenly(NamedTuple):
    """Steps of two ranks of speeds 1 and 1/2.

    Attributes:
        seconds: of every way by rounds; the name of a way with a pipeline is `chosen` or `equal`, and its schedule.
        work: part of the work of each chosen stage.
        ranks: ranks that compute them.
        schedule: schedule that Evener chose.
    """

    seconds: dict[str, list[float]]
    work: list[float]
    ranks: list[int]
    schedule: str


def uneven_stages(rounds: int, group: Group) -> Unevenly:
    """One of two ranks of speeds 1 and 1/2, which really compute: chosen stages, equal stages, the whole model alone.

    All schedules have the same chosen stages. A slowed rank is held to twice what its stage takes at full speed, in the
    same run: idling between short actions costs a processor its caches, so that it would be less than half as fast.
    """
    micro_batches, layers = UNEVEN_MICRO_BATCHES, 24
    x, y = torch.randn(micro_batches * 64, 256), torch.randn(micro_batches * 64, 256)

    def pipeline(schedule: ScheduleChoice, on: Group | list[torch.device], **cut: Any) -> Pipeline:
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)) for _ in range(layers))
        )
        return Pipeline(
            model, x, F.mse_loss, micro_batches=micro_batches, on=on, targets=y, rematerialise="never",
            schedule=schedule, **cut,
        )  # fmt: skip

    chosen, alone = pipeline("auto", group), pipeline("1f1b", [CPU])
    layout = chosen.plan.layout
    cuts: dict[str, dict[str, Any]] = {
        "chosen": {"stages": [layout.first_operation(1)], "replicas": [layout.ranks]},
        "equal": {"stages": [str(layers // 2)]},
    }
    own: list[float] = []

    def by_both(way: Pipeline) -> None:
        part = way.plan.work[way.plan.layout.ranks.index(group.rank)]
        group.timer.pace.reference = lambda _samples: part * median(own)
        group.timer.pace.expect(len(x))
        way.step(x, y)
        group.timer.close_step(len(x))

    ways: dict[str, Callable[[], object]] = {
        "alone": lambda: alone.step(x, y) if group.is_leader else None,
        "together": lambda: own.append(seconds_of(lambda: alone.step(x, y))),
    }
    for (name, cut), schedule in product(cuts.items(), SCHEDULES):
        ways[f"{name} {schedule}"] = partial(by_both, pipeline(schedule, group, **cut))
    seconds = timed(group, ways, rounds) | {"own": own[1:]}
    return Unevenly(seconds, list(chosen.plan.work), list(layout.ranks), chosen.schedule)


def uneven(results: Results) -> None:
    """Speeds 1 and 1/2. The ideal step takes the fast rank's seconds over 1.5, and the bubble's."""
    ideal = (UNEVEN_MICRO_BATCHES + 1) / UNEVEN_MICRO_BATCHES / 1.5
    program = partial(uneven_stages, results.options.rounds)
    seconds, work, ranks, chosen = measure_on(unpinned(1.0, 0.5), program, Unevenly)
    for schedule in SCHEDULES:
        step = seconds[f"chosen {schedule}"]
        results.add(
            "{schedule:11} " + ", ".join(f"{part:.1%}" for part in work) + " of the work on ranks {ranks}: "
            "{speed_up:.3f}x faster than equal stages; {of_alone:.1%} of the ideal by the fast rank's seconds while "
            "the other one rests, {of_both:.1%} by those while both compute"
            + (", chosen by Evener" if schedule == chosen else ""),
            benchmark="uneven",
            schedule=schedule,
            work=work,
            ranks=ranks,
            speed_up=ratios(seconds[f"equal {schedule}"], step).median,
            of_alone=ideal * ratios(seconds["alone"], step).median,
            of_both=ideal * ratios(seconds["own"], step).median,
            is_chosen=schedule == chosen,
        )


BENCHMARKS = {"overhead": overhead, "bubble": bubbles, "uneven": uneven}


def main() -> None:
    """The benchmarks that are named."""
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="+", choices=list(BENCHMARKS))
    parser.add_argument("--rounds", type=int, default=15)
    words = parser.parse_args()
    torch.set_num_threads(1)
    with open_results(words) as results:
        for name in words.names:
            BENCHMARKS[name](results)


if __name__ == "__main__":
    import_module("pipeline").main()  # ranks import what is defined here
