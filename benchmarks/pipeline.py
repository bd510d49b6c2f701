"""Evener's pipeline against PyTorch's own and against the ideal; what it holds in memory is in pipeline_memory.py.

    python benchmarks/pipeline.py overhead       # K=2: a step, relative to torch.distributed.pipelining's
    python benchmarks/pipeline.py bubble         # idle share of stages that wait, against (K-1) / (M+K-1)
    python benchmarks/pipeline.py uneven         # speeds 1 and 1/2: stages chosen for them against equal ones

Ratios are medians of rounds in which the ways took turns.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from evener.comm.group import Group, join_group, leave_group
from evener.comm.step_timing import StepTimer
from evener.launch.nodes import LocalNode
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local
from evener.models.resnet import resnet152
from evener.oracle.schedule import bubble
from evener.parallel.pipeline.pipeline import Pipeline

CPU = torch.device("cpu")


def hardware() -> str:
    """What this is measured on."""
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, PyTorch {torch.__version__}"


def ranks(program: Callable[[RankEnvironment, Any], None], speeds: list[float], order: dict[str, Any]) -> str:
    """Run `program` with a rank a speed; returns what the first one wrote."""
    nodes = [LocalNode(name=f"n{i}", speeds=((0, speed),), threads=1) for i, speed in enumerate(speeds)]
    with tempfile.TemporaryDirectory() as folder:
        run_local(program, nodes, {**order, "file": str(Path(folder, "result"))}, patience=60, on_event=print)
        return Path(folder, "result").read_text()


def joined(env: RankEnvironment) -> Group:
    """All ranks, with this one's timer."""
    return join_group(
        rank=env.rank,
        nodes=env.names,
        device=env.device,
        store=env.store,
        patience=60,
        timer=StepTimer(env.device, env.node.speed_at(0)),
    )


def timed(group: Group, ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every way in every round, all ranks together; a round to warm up is left out."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds + 1):
        for name, way in ways.items():
            group.barrier()
            begin = time.perf_counter()
            way()
            group.barrier()
            if i:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


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


def compare_with_pytorch(env: RankEnvironment, order: dict[str, Any]) -> None:
    """One of two ranks: the same cut, schedule and micro-batches, by PyTorch and by Evener, in turn."""
    group, micro_batches = joined(env), 8
    model, x, y, loss, cut = TASKS[order["task"]]()
    stage = (model[:cut], model[cut:])[env.rank]
    sample = x[: len(x) // micro_batches]
    with torch.no_grad():
        middle = model[:cut].eval()(sample)
        final = model[cut:].eval()(middle)
    model.train()
    given, made = ((sample,), (middle.requires_grad_(),)) if env.rank == 0 else ((middle.requires_grad_(),), (final,))
    theirs = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[order["schedule"]](
        PipelineStage(stage, env.rank, 2, CPU, input_args=given, output_args=made), micro_batches, loss_fn=loss
    )
    own_model = TASKS[order["task"]]()[0]
    begins = [next(n for i, (n, _) in enumerate(own_model.named_children()) if i == cut)]
    ours = Pipeline(
        own_model, x, loss, stages=begins, micro_batches=micro_batches, on=group, schedule=order["schedule"],
        rematerialise="never",
    )  # fmt: skip

    def by_pytorch() -> None:
        for parameter in stage.parameters():
            parameter.grad = None
        theirs.step(x) if env.rank == 0 else theirs.step(target=y)

    def by_evener() -> None:
        for parameter in ours.parameters():
            parameter.grad = None
        ours.step(x, y)

    seconds = timed(group, {"pytorch": by_pytorch, "evener": by_evener}, order["rounds"])
    if env.rank == 0:
        ratios = [a / b for a, b in zip(seconds["evener"], seconds["pytorch"], strict=True)]
        Path(order["file"]).write_text(
            f"{median(seconds['pytorch']) * 1e3:.1f} ms, evener {median(seconds['evener']) * 1e3:.1f} ms; "
            f"median of the rounds' ratios {median(ratios):.3f}"
        )
    group.barrier()
    leave_group()


def overhead(rounds: int) -> None:
    """A step of two ranks, relative to PyTorch's."""
    for task, schedule in product(TASKS, ("gpipe", "1f1b")):
        found = ranks(compare_with_pytorch, [1.0, 1.0], {"task": task, "schedule": schedule, "rounds": rounds})
        print(f"{task:8} {schedule:6} pytorch {found}", flush=True)


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


def idle_shares(env: RankEnvironment, order: dict[str, Any]) -> None:
    """One rank: the idle share for every number of micro-batches."""
    group, stages = joined(env), order["stages"]
    lines = []
    for micro_batches, schedule in product((1, 4, 16), ("gpipe", "1f1b")):
        x = torch.zeros(micro_batches, 3)
        model, begins = nn.Sequential(*(Wait(0.03) for _ in range(stages))), [str(i) for i in range(1, stages)]
        options: dict[str, Any] = {"schedule": schedule, "micro_batches": micro_batches, "rematerialise": "never"}
        pipeline = Pipeline(model, x, F.mse_loss, stages=begins, on=group, **options)
        shares = []
        for _ in range(3):
            pipeline.step(x, x)
            shares.append(pipeline.timeline().bubble)
        ideal = bubble(stages, micro_batches)
        lines.append(f"K={stages} M={micro_batches:2} {schedule:6} measured {median(shares):.3f}, paper {ideal:.3f}")
    if env.rank == 0:
        Path(order["file"]).write_text("\n".join(lines))
    group.barrier()
    leave_group()


def bubbles(_rounds: int) -> None:
    """Two and four ranks that wait."""
    for stages in (2, 4):
        print(ranks(idle_shares, [1.0] * stages, {"stages": stages}), flush=True)


def uneven_stages(env: RankEnvironment, order: dict[str, Any]) -> None:
    """One of two ranks of speeds 1 and 1/2, which really compute: chosen stages, equal stages, the whole model alone.

    A slowed rank is held to twice what its stage takes at full speed, in the same run: idling between short actions
    costs a processor its caches, so that it would be less than half as fast. The ideal step takes the fast rank's
    seconds over 1.5, and the bubble's.
    """
    group, micro_batches, layers = joined(env), 16, 24
    x, y = torch.randn(micro_batches * 64, 256), torch.randn(micro_batches * 64, 256)

    def pipeline(stages: list[str] | None, on: Group | list[torch.device]) -> Pipeline:
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)) for _ in range(layers))
        )
        return Pipeline(
            model, x, F.mse_loss, stages=stages, micro_batches=micro_batches, on=on, targets=y, rematerialise="never",
            schedule=order["schedule"],
        )  # fmt: skip

    chosen, equal, alone = pipeline(None, group), pipeline([str(layers // 2)], group), pipeline(None, [CPU])
    own: list[float] = []

    def together() -> None:
        begin = time.perf_counter()
        alone.step(x, y)
        own.append(time.perf_counter() - begin)

    def by_both(way: Pipeline) -> None:
        part = way.plan.work[way.plan.layout.ranks.index(env.rank)]
        group.timer.pace.reference = lambda _samples: part * median(own)
        group.timer.pace.expect(len(x))
        way.step(x, y)
        group.timer.close_step(len(x))

    ways: dict[str, Callable[[], object]] = {
        "alone": lambda: alone.step(x, y) if env.rank == 0 else None,
        "together": together,
        "chosen": lambda: by_both(chosen),
        "equal": lambda: by_both(equal),
    }
    seconds = timed(group, ways, order["rounds"])
    if env.rank == 0:
        ideal = (micro_batches + 1) / micro_batches / 1.5  # and the bubble
        gain = median(a / b for a, b in zip(seconds["equal"], seconds["chosen"], strict=True))
        of_alone = median(ideal * a / b for a, b in zip(seconds["alone"], seconds["chosen"], strict=True))
        of_both = median(ideal * a / b for a, b in zip(own[1:], seconds["chosen"], strict=True))
        parts = ", ".join(f"{part:.1%}" for part in chosen.plan.work)
        Path(order["file"]).write_text(
            f"{parts} of the work on ranks {chosen.plan.layout.ranks}: {gain:.3f}x faster than equal stages; "
            f"{of_alone:.1%} of the ideal by the fast rank's seconds while the other one rests, "
            f"{of_both:.1%} by those while both compute"
        )
    group.barrier()
    leave_group()


def uneven(rounds: int) -> None:
    """Speeds 1 and 1/2."""
    for schedule in ("gpipe", "1f1b"):
        found = ranks(uneven_stages, [1.0, 0.5], {"schedule": schedule, "rounds": rounds})
        print(f"{schedule:6} {found}", flush=True)


BENCHMARKS = {"overhead": overhead, "bubble": bubbles, "uneven": uneven}


def main() -> None:
    """Run the benchmarks that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=list(BENCHMARKS))
    parser.add_argument("--rounds", type=int, default=15)
    words = parser.parse_args()
    torch.set_num_threads(1)
    print(hardware())
    for name in words.names:
        BENCHMARKS[name](words.rounds)


if __name__ == "__main__":
    main()
