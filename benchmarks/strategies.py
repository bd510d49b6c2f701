"""Filter, channel and spatial parallelism side by side within one run: seconds, bytes and memory of a training step.

    python benchmarks/strategies.py filter [--ranks 2] [--network resnet152] [--size 64] [--batch 8] [--rounds 3]
    python benchmarks/strategies.py spatial [--ranks 2] [--network resnet50] [--size 512] [--batch 1] [--rounds 3]
    python benchmarks/strategies.py memory [--ranks 4] [--network unet] [--size 1024] [--division spatial]

Ranks are processes of one thread each. `filter`: mode `out` as published against ours, in turn; ratios of the rounds'
seconds and of the bytes sent. `spatial`: the step of one process on the whole image, the step of all ranks together,
and, as the limit of the machine, all ranks at once with an image of their own of the height of a strip, alone and
without exchange. `memory`: what the fullest rank holds against one process, tensors and the process's own peak.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import torchvision_operators  # noqa: F401, isort: skip

import numpy as np
import torch
import torchvision
from torch import Tensor, nn

from evener.benchmark.dry_run import LiveBytes
from evener.comm.group import Group, join_group, leave_group
from evener.launch.nodes import LocalNode
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local
from evener.oracle.division.layout import Replica
from evener.oracle.division.plan import Arrangement
from evener.parallel.divided import ShardedModel
from evener.parallel.process_mesh import form_process_mesh
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
    part = ShardedModel(model, form_process_mesh(group, arrangement), [x])
    del model
    return part, stepper(part, x, y)


def timed(group: Group, step: Callable[[], None]) -> tuple[float, float]:
    """Seconds from the moment when all are ready until all are done, and the most processor time of a rank."""
    group.barrier()
    start, busy = time.perf_counter(), time.process_time()
    step()
    busy = time.process_time() - busy
    (most,) = group.all_reduce_max([busy])
    return time.perf_counter() - start, most


def join(env: RankEnvironment) -> Group:
    torch.set_num_threads(1)
    return join_group(rank=env.rank, nodes=env.names, device=env.device, store=env.store, patience=600)


def in_turn(group: Group, ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds and processor seconds of each way in every round but the first, which warms up."""
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(rounds + 1):
        for way, step in ways.items():
            found[way].append(timed(group, step))
    for way, times in found.items():
        del times[0]
        wall, busy = zip(*times, strict=True)
        if group.rank == 0:
            print(
                f"  {way:8} {median(wall):7.3f} s a step ({min(wall):.3f} to {max(wall):.3f}), "
                f"{median(busy):7.3f} s of processor time ({min(busy):.3f} to {max(busy):.3f})"
            )
    return found


def ratio(found: dict[str, list[tuple[float, float]]], way: str, other: str, factor: float = 1.0) -> str:
    """Ratio of two ways: median of the rounds, and their range; of seconds and of processor seconds."""
    texts = []
    for kind in (0, 1):
        rounds = sorted(factor * a[kind] / b[kind] for a, b in zip(found[way], found[other], strict=True))
        texts.append(f"{median(rounds):.2f} ({rounds[0]:.2f} to {rounds[-1]:.2f})")
    return f"{texts[0]}, of processor time {texts[1]}"


def compare_filter(env: RankEnvironment, order: dict[str, Any]) -> None:
    """One rank: `out` and ours in turn."""
    group = join(env)
    sent = {}
    steps = {}
    for way in ("filter", "sharded"):
        _, steps[way] = divided(group, way, order)
        before = group.traffic.sent_bytes
        steps[way]()
        sent[way] = group.traffic.sent_bytes - before
    found = in_turn(group, steps, order["rounds"])
    if env.rank == 0:
        print(f"  rank 0 sends in a step: filter {sent['filter'] / MIB:.1f} MiB, ours {sent['sharded'] / MIB:.1f} MiB")
        print(f"  bytes of ours / filter: {sent['sharded'] / sent['filter']:.3f}")
        print(f"  filter / ours: {ratio(found, 'filter', 'sharded')}")
    leave_group()


def compare_spatial(env: RankEnvironment, order: dict[str, Any]) -> None:
    """One rank: one process, all together, and all at once without exchange, in turn."""
    group = join(env)
    _, together = divided(group, "spatial", order)
    model, x, y = network(order)
    strip = stepper(model, x[:, :, : order["size"] // group.size].contiguous(), y)
    whole = stepper(network(order)[0], x, y) if env.rank == 0 else lambda: None
    found = in_turn(group, {"serial": whole, "together": together, "limit": strip}, order["rounds"])
    if env.rank == 0:
        for way in ("together", "limit"):
            print(f"  {way} / (serial / {group.size}): {ratio(found, way, 'serial', group.size)}")
        print(f"  together / limit: {ratio(found, 'together', 'limit')}")
        print("  seconds waited, all rounds:", {k: round(v, 2) for k, v in group.traffic.seconds.items()})
    leave_group()


def measure_memory(env: RankEnvironment, order: dict[str, Any]) -> None:
    """One rank: bytes of weights and momentum, peak of a step's tensors beside, peak of the process."""
    group = join(env)
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
    own = np.array([weights, live.peak, weights + live.peak, grown], dtype=np.float64)
    rows = [np.frombuffer(row) for row in group.all_gather_bytes(own.tobytes())]
    if group.is_leader:
        Path(order["file"]).write_text(" ".join(str(most) for most in np.max(rows, axis=0)))
    group.barrier()
    leave_group()


HELD = ("weights and momentum", "peak of a step beside them", "both together", "peak of the process")


def compare_memory(ranks: int, order: dict[str, Any]) -> None:
    """The fullest rank against one process, each way in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for size in (ranks, 1):
            file = Path(folder, str(size))
            nodes = [LocalNode(name=f"n{i}", threads=1) for i in range(size)]
            run_local(measure_memory, nodes, {**order, "file": str(file)}, patience=600, on_event=print)
            found.append([float(text) for text in file.read_text().split()])
    for what, own, whole in zip(HELD, *found, strict=True):
        print(f"  {what:30} {own / MIB:8.0f} MiB of {whole / MIB:8.0f} MiB: {own / whole:.1%}")


def main() -> None:
    """Measure on this machine, print a few lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("filter", "spatial", "memory"))
    defaults = {
        "filter": (2, "resnet152", 64, 8),
        "spatial": (2, "resnet50", 512, 1),
        "memory": (4, "unet", 1024, 1),
    }
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--network")
    parser.add_argument("--size", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--division", default="spatial")
    args = parser.parse_args()
    ranks, *rest = defaults[args.what]
    order = dict(zip(("network", "size", "batch"), rest, strict=True))
    order |= {key: value for key, value in vars(args).items() if value is not None}
    ranks = args.ranks or ranks
    print(
        f"{args.what}: {order['network']}, {order['batch']} images of {order['size']}, {ranks} ranks, "
        f"PyTorch {torch.__version__}"
    )
    if args.what == "memory":
        compare_memory(ranks, order)
        return
    nodes = [LocalNode(name=f"n{i}", threads=1) for i in range(ranks)]
    program = compare_filter if args.what == "filter" else compare_spatial
    run_local(program, nodes, order, patience=600, on_event=print)


if __name__ == "__main__":
    main()
