"""Evener's step on equal nodes against plain DistributedDataParallel, in turn within one run.

    python benchmarks/ddp_parity.py [--blocks 8] [--steps 10] [--norm none|batch]

Two ranks, one core each. Plain: DDP with a DataLoader and a DistributedSampler over the same data set, mean loss, its
own optimiser step, BatchNorm (if any) local to each rank. Evener: the step that `evener train` performs, loading,
reports and re-balancing included, BatchNorm synchronised. Prints the ratio of the medians; below 1 Evener is faster.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from evener.comm.group import join_group, leave_group
from evener.launch.nodes import parse_local_nodes
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local
from evener.oracle.apportion import Worker
from evener.oracle.data_parallel import Candidate, GradientSync, plan_data_parallel
from evener.run.config import RunConfig
from evener.run.context import make_context
from evener.run.loop import Loop
from evener.run.training import make_training


def compare(env: RankEnvironment, order: dict[str, Any]) -> None:
    """One rank: blocks of plain steps and of Evener's, in turn."""
    config = RunConfig(
        task="synthetic",
        option={"batch_norm": str(order["norm"] == "batch").lower(), "samples": str(order["batch"] * 1000 // 8)},
        output=Path(order["folder"]),
        batch_size=order["batch"],
        epochs=1000,
    )
    group = join_group(rank=env.rank, nodes=env.names, device=env.device, store=env.store, patience=600)
    alone, context = make_context(env, group, config), make_context(env, group, config)
    plain = DistributedDataParallel(alone.model, gradient_as_bucket_view=True)
    optimizer = alone.make_optimizer(plain.parameters())
    worker = Worker(unit_seconds=1.0)
    candidates = [Candidate(node=name, device="cpu", worker=worker) for name in env.names]
    plan = plan_data_parallel(candidates, order["batch"], GradientSync(gradient_bytes=0))
    loop = Loop(make_training(context, plan, config), config)
    loader = loop.loader(1)
    own = order["batch"] // group.size
    sampler: DistributedSampler[Any] = DistributedSampler(context.train_data, group.size, group.rank, drop_last=True)
    batches = itertools.chain.from_iterable(itertools.repeat(DataLoader(context.train_data, own, sampler=sampler)))

    def plain_step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        torch.autograd.backward(context.task.loss(plain(inputs), targets))
        optimizer.step()

    seconds: dict[str, list[float]] = {"plain": [], "evener": []}
    steps = {"plain": 0, "evener": 0}
    for block in range(order["blocks"] + 1):
        for way in ("plain", "evener"):
            group.barrier()
            for _ in range(order["steps"]):
                steps[way] += 1
                start = time.perf_counter()
                plain_step() if way == "plain" else loop.one_step(steps[way], loader)
                if block:
                    seconds[way].append(time.perf_counter() - start)
    if env.rank == 0:
        blocks = range(order["blocks"])
        n = order["steps"]
        ratios = [
            median(seconds["evener"][b * n : (b + 1) * n]) / median(seconds["plain"][b * n : (b + 1) * n])
            for b in blocks
        ]
        Path(order["folder"], "result").write_text(
            f"plain {median(seconds['plain']) * 1e3:.1f} ms, evener {median(seconds['evener']) * 1e3:.1f} ms a step; "
            f"ratio of medians {median(seconds['evener']) / median(seconds['plain']):.3f}, "
            f"median of the blocks' ratios {median(ratios):.3f} (from {min(ratios):.3f} to {max(ratios):.3f})"
        )
    group.barrier()
    leave_group()


def main() -> None:
    """Run both norms and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--norm", choices=["none", "batch"], default="none")
    words = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as folder:
        run_local(
            compare, parse_local_nodes("1,1"), {**words, "folder": folder}, patience=60, on_event=lambda _word: None
        )
        print(f"norm {words['norm']}: {Path(folder, 'result').read_text()}")


if __name__ == "__main__":
    main()
