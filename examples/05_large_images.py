"""Large images on small nodes: a U-Net on 1024x1024 images, whose rows two uneven nodes divide; nothing to download.

    python examples/05_large_images.py

One process first, then two that stand for two machines, the second of half the speed: it takes a third of the rows.
Each holds its rows of every activation and the few rows around them that its convolutions reach; weights are whole on
both. Losses are the same step by step. Memory is what a step holds at its peak beside the weights.
"""

import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from evener.benchmark.dry_run import LiveBytes
from evener.comm.joining import join_group, leave_group
from evener.comm.step_timing import StepTimer
from evener.experiments.models.unet import UNet
from evener.launch.nodes import parse_local_nodes
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local
from evener.oracle.division.layout import Replica
from evener.oracle.division.plan import Arrangement
from evener.parallel.parallel_model import Criterion
from evener.parallel.process_mesh import form_process_mesh
from evener.parallel.sharded import DividedModel

SIZE, STEPS = 1024, 4


def image(seed: int) -> tuple[Tensor, Tensor]:
    """One noisy image [1, 1, 1024, 1024] of a disc, and which pixels belong to it."""
    draw = torch.Generator().manual_seed(seed)
    y, x, radius = (torch.rand(3, generator=draw) * SIZE / 3 + SIZE / 4).tolist()
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    disc = (rows - y) ** 2 + (columns - x) ** 2 < (radius / 2) ** 2
    return (disc + 0.8 * torch.randn(disc.shape, generator=draw))[None, None], disc.long()[None]


def train(env: RankEnvironment, shares: tuple[float, ...]) -> None:
    """What every rank runs; `shares` are the relative numbers of rows."""
    timer = StepTimer(env.device, env.node.speed_at(0))
    group = join_group(
        rank=env.rank, nodes=env.names, device=env.device, store=env.store, patience=env.patience, timer=timer
    )
    torch.manual_seed(0)
    place = form_process_mesh(group, Arrangement(division="spatial", replicas=(Replica(shares=shares),)))
    criterion = Criterion(loss=nn.functional.cross_entropy, autocast=nullcontext, scale=lambda loss: loss)
    model = DividedModel(UNet(inputs=1, classes=2, width=4, depth=3), place, image(0)[0], criterion)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    live = LiveBytes()
    for step in range(1, STEPS + 1):
        images, discs = image(step)  # every rank of a replica is given the whole image
        optimizer.zero_grad()
        group.barrier()
        begin = time.perf_counter()
        with live if step == STEPS else nullcontext():  # counting takes time: only of the last step
            timer.resume("fb")
            loss = model.add_gradients(images, discs, samples=1, total=1, is_last=True)
            timer.pause()
        optimizer.step()
        group.barrier()
        seconds = time.perf_counter() - begin
        if group.is_leader:
            print(f"step {step}: loss {loss:.5f}, {seconds:.2f} s", flush=True)
    for row in group.all_gather_bytes(f"{env.node.name} of {group.size} held {live.peak / 2**20:.0f} MiB".encode()):
        if group.is_leader:
            print(row.decode(), flush=True)
    sent = group.traffic.sent_bytes / STEPS / 2**20
    if group.is_leader:
        print(
            f"{env.node.name} sent {sent:.2f} MiB a step, of an image of {SIZE * SIZE * 4 / 2**20:.0f} MiB", flush=True
        )
    group.barrier()
    leave_group()


def ignore(_word: Any) -> None:
    """The ranks print for themselves."""


def main() -> None:
    """One process, then two."""
    run_local(train, parse_local_nodes("1.0"), (1.0,), patience=60, on_event=ignore)
    run_local(train, parse_local_nodes("1.0,0.5"), (2.0, 1.0), patience=60, on_event=ignore)


if __name__ == "__main__":  # the ranks import this file too
    main()
