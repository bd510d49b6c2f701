"""Filter, channel and spatial parallelism side by side within one run: seconds, bytes and memory of a training step.

    python benchmarks/strategies.py filter [--ranks 2] [--network resnet152] [--size 64] [--batch 8] [--rounds 3]
    python benchmarks/strategies.py spatial [--ranks 2] [--network resnet50] [--size 512] [--batch 1] [--rounds 3]
    python benchmarks/strategies.py memory [--ranks 4] [--network unet] [--size 1024] [--division spatial]

Ranks are processes of one thread each. `filter`: mode `out` as published against ours, in turn; ratios of the rounds'
seconds and of the bytes sent. `spatial`: the step of one process on the whole image, the step of all ranks together,
and, as the limit of the machine, all ranks at once with an image of their own of the height of a strip, alone and
without exchange. `memory`: what the fullest rank holds against one process, tensors and the process's own peak.
All three take --json.
"""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import torchvision_operators  # noqa: F401, isort: skip

import torch
import torchvision
from results import Results, open_results, parser_of
from torch import Tensor, nn
from turns import in_turn, ratios, spread

from evener.benchmark.dry_run import LiveBytes
from evener.comm.group import Group
from evener.experiments.local_ranks import measure_on
from evener.launch.nodes import NodeSpec
from evener.oracle.division.layout import Replica
from evener.oracle.division.plan import Arrangement
from evener.parallel.process_mesh import form_process_mesh
from evener.parallel.sharded import ShardedModule
from support.division_networks import UNet

MIB = 2**20


def network(order: dict[str, Any]) -> tuple[nn.Module, Tensor, Tensor]:
    """The same network and batch on every rank."""
    torch.manual_seed(0)
    if order["network"] == "unet":
        model: nn.Module = nn.Sequential(UNet(32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 200))
    else:
        model = getattr(torchvision.models, order["network"])(num_classes=200)
    x = torch.randn(order["batch"], 3, order["size"], order["size"])
    return model, x, torch.randint(0, 200, (order["batch"],))


def stepper(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """A training step: forward, backward, update with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()

    return step


def divided(group: Group, division: Any, order: dict[str, Any]) -> tuple[nn.Module, Callable[[], None]]:
    """This rank's part, and a training step of all ranks together."""
    model, x, y = network(order)
    arrangement = Arrangement(division=division, replicas=(Replica(shares=(1.0,) * group.size),))
    part = ShardedModule(model, form_process_mesh(group, arrangement), [x])
    del model
    return part, stepper(part, x, y)


class Took(NamedTuple):
    """Of one step: seconds from the moment when all are ready until all are done, and the most processor time."""

    seconds: float
    busy: float


class Found(NamedTuple):
    """What a comparison of ways found: every way's steps by rounds; by way bytes sent, by kind seconds waited."""

    steps: dict[str, list[Took]]
    sent: dict[str, float]
    waited: dict[str, float]


def timed(group: Group, step: Callable[[], None]) -> Took:
    """One step of all ranks."""
    group.barrier()
    start, busy = time.perf_counter(), time.process_time()
    step()
    (most,) = group.all_reduce_max([time.process_time() - busy])
    return Took(time.perf_counter() - start, most)


def steps_of(group: Group, ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[Took]]:
    """All ways in turn."""
    return in_turn({way: partial(timed, group, step) for way, step in ways.items()}, rounds)


def filters(order: dict[str, Any], group: Group) -> Found:
    """One rank: `out` and ours in turn."""
    sent, steps = dict[str, float](), {}
    for way in ("filter", "sharded"):
        _, steps[way] = divided(group, way, order)
        before = group.traffic.sent_bytes
        steps[way]()
        sent[way] = group.traffic.sent_bytes - before
    return Found(steps_of(group, steps, order["rounds"]), sent, {})


def images(order: dict[str, Any], group: Group) -> Found:
    """One rank: one process, all together, and all at once without exchange, in turn."""
    _, together = divided(group, "spatial", order)
    model, x, y = network(order)
    strip = stepper(model, x[:, :, : order["size"] // group.size].contiguous(), y)
    whole = stepper(network(order)[0], x, y) if group.is_leader else lambda: None
    steps = steps_of(group, {"serial": whole, "together": together, "limit": strip}, order["rounds"])
    return Found(steps, {}, dict(group.traffic.seconds))


def show_steps(results: Results, found: Found) -> None:
    """Seconds of every way."""
    for way, steps in found.steps.items():
        seconds, busy = (spread(values) for values in zip(*steps, strict=True))
        text = "  {way:8} {seconds:.3f} s a step, {busy:.3f} s of processor time"
        results.add(text, way=way, seconds=seconds, busy=busy)


def show_ratio(results: Results, found: Found, way: str, other: str, parts: int = 1) -> None:
    """Of two ways, by rounds; of seconds and of processor seconds; 1 is to be `parts` times as fast."""
    own, others = found.steps[way], found.steps[other]
    beside = "({other} / {parts})" if parts > 1 else "{other}"
    results.add(
        f"  {{way}} / {beside}: {{seconds:.2f}}, of processor time {{busy:.2f}}",
        way=way,
        other=other,
        parts=parts,
        seconds=ratios([parts * took.seconds for took in own], [took.seconds for took in others]),
        busy=ratios([parts * took.busy for took in own], [took.busy for took in others]),
    )


def compare_filter(results: Results, ranks: int, order: dict[str, Any]) -> None:
    """`out` and ours, their seconds and bytes."""
    found = measure_on(nodes_of(ranks), partial(filters, order), Found)
    show_steps(results, found)
    own, out = found.sent["sharded"], found.sent["filter"]
    results.add(
        "  rank 0 sends in a step: filter {filter_mib:.1f} MiB, ours {own_mib:.1f} MiB\n"
        "  bytes of ours / filter: {ratio:.3f}",
        filter_mib=out / MIB,
        own_mib=own / MIB,
        ratio=own / out,
    )
    show_ratio(results, found, "filter", "sharded")


def compare_spatial(results: Results, ranks: int, order: dict[str, Any]) -> None:
    """All ranks together against a part of one process's seconds, and against the machine's limit."""
    found = measure_on(nodes_of(ranks), partial(images, order), Found)
    show_steps(results, found)
    for way in ("together", "limit"):
        show_ratio(results, found, way, "serial", ranks)
    show_ratio(results, found, "together", "limit")
    for kind, seconds in found.waited.items():
        results.add("  waited in all rounds, {kind}: {seconds:.2f} s", kind=kind, seconds=seconds)


class Held(NamedTuple):
    """Bytes that the fullest rank holds."""

    weights_and_momentum: float
    peak_of_a_step: float
    both: float
    peak_of_the_process: float


def measure_memory(order: dict[str, Any], group: Group) -> Held:
    """One rank: bytes of weights and momentum, peak of a step's tensors beside them, peak of the process."""
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if group.size > 1:
        model, step = divided(group, order["division"], order)
    else:
        model, x, y = network(order)
        step = stepper(model, x, y)
    step()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    with LiveBytes() as live:
        step()
    weights = sum(p.nbytes * 2 for p in model.parameters())
    return Held(*group.all_reduce_max([weights, live.peak, weights + live.peak, grown]))


def compare_memory(results: Results, ranks: int, order: dict[str, Any]) -> None:
    """The fullest rank against one process, each way in processes of its own."""
    own, whole = (measure_on(nodes_of(size), partial(measure_memory, order), Held) for size in (ranks, 1))
    for what, part, all_of_it in zip(Held._fields, own, whole, strict=True):
        results.add(
            "  {what:30} {mib:8.0f} MiB of {serial_mib:8.0f} MiB: {share:.1%}",
            what=what.replace("_", " "),
            mib=part / MIB,
            serial_mib=all_of_it / MIB,
            share=part / all_of_it,
        )


def nodes_of(ranks: int) -> list[NodeSpec]:
    """Of one thread each."""
    return [NodeSpec(name=f"n{i}", threads=1) for i in range(ranks)]


BENCHMARKS = {"filter": compare_filter, "spatial": compare_spatial, "memory": compare_memory}
DEFAULTS = {
    "filter": {"ranks": 2, "network": "resnet152", "size": 64, "batch": 8},
    "spatial": {"ranks": 2, "network": "resnet50", "size": 512, "batch": 1},
    "memory": {"ranks": 4, "network": "unet", "size": 1024, "batch": 1},
}


def main() -> None:
    """One comparison."""
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=list(BENCHMARKS))
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--network")
    parser.add_argument("--size", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--division", default="spatial")
    words = parser.parse_args()
    for option, value in DEFAULTS[words.what].items():
        if getattr(words, option) is None:
            setattr(words, option, value)
    with open_results(words) as results:
        results.say(f"{words.what}: {words.network}, {words.batch} images of {words.size}, {words.ranks} ranks")
        BENCHMARKS[words.what](results, words.ranks, vars(words))


if __name__ == "__main__":
    import_module("strategies").main()  # ranks import what is defined here
