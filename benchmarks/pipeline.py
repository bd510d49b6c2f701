"""Evener's pipeline against PyTorch's own, against the ideal, and against what it should hold in memory.

    python benchmarks/pipeline.py overhead       # K=2: a step, relative to torch.distributed.pipelining's
    python benchmarks/pipeline.py bubble         # idle share of stages that wait, against (K-1) / (M+K-1)
    python benchmarks/pipeline.py uneven         # speeds 1 and 1/2: stages chosen for them against equal ones
    python benchmarks/pipeline.py memory         # AmoebaNet-D: activation bytes with and without recomputing
    python benchmarks/pipeline.py transformer    # the largest Transformer that a budget of memory a device allows

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

from evener.cluster import LocalNode, Seat, run_local
from evener.comm import Group, Pace, join_group, leave_group
from evener.errors import DoesNotFit
from evener.models import AmoebaNetD, Transformer, resnet152
from evener.models.transformer import tokens_in, translation_loss
from evener.oracle.stages import Team
from evener.parallel.pipeline import Pipeline
from evener.parallel.pipeline.memory import LiveBytes
from evener.parallel.pipeline.schedule import bubble

CPU = torch.device("cpu")


def ranks(program: Callable[[Seat, Any], None], speeds: list[float], order: dict[str, Any]) -> str:
    """Run `program` with a rank a speed; returns what the first one wrote."""
    nodes = [LocalNode(name=f"n{i}", speeds=((0, speed),), threads=1) for i, speed in enumerate(speeds)]
    with tempfile.TemporaryDirectory() as folder:
        run_local(program, nodes, {**order, "file": str(Path(folder, "result"))}, patience=60, on_word=print)
        return Path(folder, "result").read_text()


def joined(seat: Seat) -> Group:
    """All ranks, with this one's pace."""
    return join_group(
        rank=seat.rank,
        nodes=seat.names,
        device=seat.device,
        store=seat.store,
        patience=60,
        pace=Pace(seat.device, seat.node.speed_at(0)),
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


def compare_with_pytorch(seat: Seat, order: dict[str, Any]) -> None:
    """One of two ranks: the same cut, schedule and micro-batches, by PyTorch and by Evener, in turn."""
    group, micro_batches = joined(seat), 8
    model, x, y, loss, cut = TASKS[order["task"]]()
    stage = (model[:cut], model[cut:])[seat.rank]
    sample = x[: len(x) // micro_batches]
    with torch.no_grad():
        middle = model[:cut].eval()(sample)
        final = model[cut:].eval()(middle)
    model.train()
    given, made = ((sample,), (middle.requires_grad_(),)) if seat.rank == 0 else ((middle.requires_grad_(),), (final,))
    theirs = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[order["schedule"]](
        PipelineStage(stage, seat.rank, 2, CPU, input_args=given, output_args=made), micro_batches, loss_fn=loss
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
        theirs.step(x) if seat.rank == 0 else theirs.step(target=y)

    def by_evener() -> None:
        for parameter in ours.parameters():
            parameter.grad = None
        ours.step(x, y)

    seconds = timed(group, {"pytorch": by_pytorch, "evener": by_evener}, order["rounds"])
    if seat.rank == 0:
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
        outputs: Tensor = _Wait.apply(x * self.weight, self.seconds)
        return outputs


def idle_shares(seat: Seat, order: dict[str, Any]) -> None:
    """One rank: the idle share for every number of micro-batches."""
    group, stages = joined(seat), order["stages"]
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
    if seat.rank == 0:
        Path(order["file"]).write_text("\n".join(lines))
    group.barrier()
    leave_group()


def bubbles(_rounds: int) -> None:
    """Two and four ranks that wait."""
    for stages in (2, 4):
        print(ranks(idle_shares, [1.0] * stages, {"stages": stages}), flush=True)


def uneven_stages(seat: Seat, order: dict[str, Any]) -> None:
    """One of two ranks of speeds 1 and 1/2, which really compute: chosen stages, equal stages, one rank alone."""
    group, micro_batches, layers = joined(seat), 16, 24
    x, y = torch.randn(micro_batches * 64, 256), torch.randn(micro_batches * 64, 256)

    def pipeline(stages: list[str] | None, on: Group | list[torch.device]) -> Pipeline:
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)) for _ in range(layers))
        )
        return Pipeline(model, x, F.mse_loss, stages=stages, micro_batches=micro_batches, on=on, rematerialise="never")

    chosen, equal, alone = pipeline(None, group), pipeline([str(layers // 2)], group), pipeline(None, [CPU])
    ways: dict[str, Callable[[], object]] = {
        "chosen": lambda: chosen.step(x, y),
        "equal": lambda: equal.step(x, y),
        "alone": lambda: alone.step(x, y) if seat.rank == 0 else None,
    }
    seconds = timed(group, ways, order["rounds"])
    if seat.rank == 0:
        ideal = [(micro_batches + 1) / micro_batches / 1.5 * one for one in seconds["alone"]]
        gain = median(a / b for a, b in zip(seconds["equal"], seconds["chosen"], strict=True))
        share = median(a / b for a, b in zip(ideal, seconds["chosen"], strict=True))
        spans = [len({name.split(".")[0] for name in names}) for names in chosen.design.layout.targets]
        Path(order["file"]).write_text(
            f"{spans} of {layers} layers on ranks {chosen.design.layout.ranks}: {gain:.3f}x faster than equal stages, "
            f"{share:.1%} of the ideal (the fast rank's seconds alone, over 1.5, and the bubble)"
        )
    group.barrier()
    leave_group()


def uneven(rounds: int) -> None:
    """Speeds 1 and 1/2."""
    print(ranks(uneven_stages, [1.0, 0.5], {"rounds": rounds}), flush=True)


def memory(_rounds: int) -> None:
    """Activation bytes of AmoebaNet-D in one process."""
    x, y = torch.randn(16, 3, 32, 32), torch.zeros(16, dtype=torch.long)
    for micro_batches in (2, 4, 8):
        peaks = {}
        for policy in ("never", "always"):
            torch.manual_seed(0)
            pipeline = Pipeline(
                AmoebaNetD(3, 32, 10), x, F.cross_entropy, on=[CPU], costs="estimated", schedule="gpipe",
                rematerialise=policy, micro_batches=micro_batches,
            )  # fmt: skip
            pipeline.step(x, y)
            with LiveBytes() as live:
                pipeline.step(x, y)
            peaks[policy] = live.peak
        share = peaks["always"] / peaks["never"]
        print(
            f"M={micro_batches}: {peaks['never'] / 1e6:.1f} MB without, {share:.1%} of them with recomputing",
            flush=True,
        )


def transformer_pipeline(layers: int, on: Group | list[torch.device], budget: float, size: int) -> Pipeline:
    """A Transformer of so many layers, built without memory, on devices of so much."""
    with torch.device("meta"):
        model = Transformer(64, layers, dim=64, heads=4, hidden=256, dropout=0.0, tied=False)
    tokens = torch.ones(16, 8, dtype=torch.long)
    team = Team(memory=(budget,) * size)
    return Pipeline(
        model, (tokens, tokens), translation_loss, on=on, micro_batches=8, rematerialise="always", costs="estimated",
        team=team, weigh=lambda targets: float(tokens_in(targets)),
    )  # fmt: skip


def largest(seat: Seat, order: dict[str, Any]) -> None:
    """One rank: the most layers that fit, and what a step of that model really holds on the fullest rank."""
    group, budget = joined(seat), order["budget"]

    def fits(layers: int) -> Pipeline | None:
        try:
            return transformer_pipeline(layers, group if group.size > 1 else [CPU], budget, group.size)
        except DoesNotFit:
            return None

    low, high = 1, 2
    while fits(high) is not None:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) is not None else (low, middle)
    pipeline = fits(low)
    assert pipeline is not None
    tokens = torch.ones(16, 8, dtype=torch.long)
    pipeline.step((tokens, tokens), tokens)
    with LiveBytes() as live:
        pipeline.step((tokens, tokens), tokens)
    own = [sum(p.numel() for p in pipeline.parameters()), sum(p.nbytes for p in pipeline.parameters()) * 4 + live.peak]
    rows = [list(map(int, row.split())) for row in group.all_gather_bytes(f"{own[0]} {own[1]}".encode())]
    if seat.rank == 0:
        fullest = max(held for _, held in rows) / budget
        Path(order["file"]).write_text(f"{low} {sum(count for count, _ in rows)} {fullest}")
    group.barrier()
    leave_group()


def transformer(_rounds: int) -> None:
    """The largest Transformer on one, two and four devices of 24 MB."""
    first = 0.0
    for devices in (1, 2, 4):
        layers, parameters, fullest = map(float, ranks(largest, [1.0] * devices, {"budget": 24e6}).split())
        first = first or parameters
        share = parameters / first / devices
        size = f"{layers:.0f} layers, {parameters / 1e6:.2f} M parameters"
        print(f"K={devices}: {size}, {share:.3f} of K times those of K=1;")
        print(f"      weights, gradients, Adam's state and activations fill {fullest:.0%} of the fullest device")


BENCHMARKS = {"overhead": overhead, "bubble": bubbles, "uneven": uneven, "memory": memory, "transformer": transformer}


def main() -> None:
    """Run the benchmarks that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=list(BENCHMARKS))
    parser.add_argument("--rounds", type=int, default=15)
    words = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, PyTorch {torch.__version__}")
    for name in words.names:
        BENCHMARKS[name](words.rounds)


if __name__ == "__main__":
    main()
