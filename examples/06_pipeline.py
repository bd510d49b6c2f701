"""A model in stages on uneven nodes of this machine: a U-Net with skips, cut by measured time, nothing to download.

    python examples/06_pipeline.py

Starts two processes that stand for two machines, the second slowed to half the speed of the first. Each one times the
parts of the model, all agree on where to cut it, and every batch flows through in micro-batches. The file that it
leaves, pipeline.json, opens in ui.perfetto.dev: who computed which micro-batch when.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evener.comm.joining import join_group, leave_group
from evener.comm.step_timing import StepTimer
from evener.experiments.models.unet import UNet
from evener.launch.nodes import parse_local_nodes
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local
from evener.parallel.pipeline.pipeline import Pipeline

SAMPLES, MICRO_BATCHES, STEPS = 48, 8, 30


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Noisy images [N, 1, 32, 32] of a disc each, and which pixels belong to it."""
    draw = torch.Generator().manual_seed(seed)
    x, y, radius = torch.rand(3, SAMPLES, 1, 1, generator=draw) * 12 + 6
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    disc = (rows - y) ** 2 + (columns - x) ** 2 < (radius / 2) ** 2
    return (disc + 0.8 * torch.randn(disc.shape, generator=draw)).unsqueeze(1), disc.long()


def train(env: RankEnvironment, folder: str) -> None:
    """What every rank runs; `folder` is where the first one leaves the timeline."""
    timer = StepTimer(env.device, env.node.speed_at(0))
    group = join_group(
        rank=env.rank, nodes=env.names, device=env.device, store=env.store, patience=env.patience, timer=timer
    )
    torch.manual_seed(0)
    pipeline = Pipeline(
        UNet(inputs=1, classes=2, width=8, depth=3),
        batch(0)[0],
        nn.functional.cross_entropy,  # the mean over the samples that it is given
        targets=batch(0)[1],  # by which the loss is timed, too
        micro_batches=MICRO_BATCHES,
        on=group,
    )
    optimizer = torch.optim.Adam(pipeline.parameters(), lr=3e-3)  # of this rank's stage
    for step in range(1, STEPS + 1):
        images, discs = batch(step)  # the first stage takes the images, the last one the discs
        optimizer.zero_grad()
        loss = pipeline.step(images, discs)
        optimizer.step()
        if pipeline.is_last and step % 10 == 0:
            print(f"step {step}: loss {loss:.3f}", flush=True)
    timeline = pipeline.timeline()
    own = sum(parameter.numel() for parameter in pipeline.parameters())
    busy = timeline.busy_seconds(pipeline.plan.layout.ranks.index(env.rank)) / timeline.seconds
    words = f"{env.node.name} holds {own} parameters and computed for {busy:.0%} of the last step"
    for row in group.all_gather_bytes(words.encode()):
        if group.is_leader:
            print(row.decode(), flush=True)
    if group.is_leader:
        Path(folder, "pipeline.json").write_bytes(timeline.chrome_trace())
    group.barrier()
    leave_group()


def ignore(_word: Any) -> None:
    """The ranks print for themselves."""


def main() -> None:
    """Start the ranks."""
    run_local(train, parse_local_nodes("1.0,0.5"), str(Path.cwd()), patience=60, on_event=ignore)


if __name__ == "__main__":  # the ranks import this file too
    main()
