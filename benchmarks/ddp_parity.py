"""Evener's step on equal nodes against plain DistributedDataParallel, in turn within one run.

    python benchmarks/ddp_parity.py [--blocks 8] [--steps 10] [--norm none|batch] [--json]

Two ranks, one core each. Plain: DDP with a DataLoader and a DistributedSampler over the same data set, mean loss, its
own optimiser step, BatchNorm (if any) local to each rank. Evener: the step that `evener train` performs, loading,
reports and re-balancing included, BatchNorm synchronised. Prints the ratio of the medians; below 1 Evener is faster.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from results import open_results, parser_of
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from turns import in_turn, ratios, seconds_of

from evener.comm.group import Group
from evener.config.run_config import RunConfig
from evener.experiments.local_ranks import measure_ranks
from evener.launch.nodes import parse_local_nodes
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.apportion import NodeCost
from evener.oracle.data_parallel import Candidate, GradientSync, plan_data_parallel
from evener.training.context import RankContext, make_context
from evener.training.loop import Loop
from evener.training.training import make_training

Step = Callable[[], object]


def plain_step(context: RankContext, data: Any) -> Step:
    """A step of DistributedDataParallel over equal parts of `data`."""
    model = DistributedDataParallel(context.model, gradient_as_bucket_view=True)
    optimizer = context.make_optimizer(model.parameters())
    size, rank = context.group.size, context.group.rank
    sampler: DistributedSampler[Any] = DistributedSampler(data, size, rank, drop_last=True)
    loader = DataLoader(data, context.batch_size // size, sampler=sampler)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        torch.autograd.backward(context.task.loss(model(inputs), targets))
        optimizer.step()

    return step


def evener_step(context: RankContext, config: RunConfig) -> Step:
    """A step of a run whose nodes are equal."""
    worker = NodeCost(unit_seconds=1.0)
    candidates = [Candidate(node=name, device="cpu", worker=worker) for name in context.group.nodes]
    plan = plan_data_parallel(candidates, context.batch_size, GradientSync(gradient_bytes=0))
    loop = Loop(make_training(context, plan, config), config)
    loader, numbers = loop.loader(1), itertools.count(1)
    return lambda: loop.one_step(next(numbers), loader)


def block_seconds(words: dict[str, Any], env: RankEnvironment, group: Group) -> dict[str, list[list[float]]]:
    """One rank: seconds of every step of both ways, by blocks."""
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            task="synthetic",
            option={"batch_norm": str(words["norm"] == "batch").lower(), "samples": str(words["batch"] * 1000 // 8)},
            output=Path(folder),
            batch_size=words["batch"],
            epochs=1000,
        )
        alone, context = make_context(env, group, config), make_context(env, group, config)
        steps = {"plain": plain_step(alone, context.train_data), "evener": evener_step(context, config)}

        def block(step: Step) -> list[float]:
            group.barrier()
            return [seconds_of(step) for _ in range(words["steps"])]

        return in_turn({way: partial(block, step) for way, step in steps.items()}, words["blocks"])


def main() -> None:
    """One norm."""
    parser = parser_of(__doc__)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--norm", choices=["none", "batch"], default="none")
    words = parser.parse_args()
    with open_results(words) as results:
        program = partial(block_seconds, vars(words))
        blocks = measure_ranks(parse_local_nodes("1,1"), program, dict[str, list[list[float]]])
        plain, evener = (median(itertools.chain(*blocks[way])) for way in ("plain", "evener"))
        results.add(
            "norm {norm}: plain {plain_ms:.1f} ms, evener {evener_ms:.1f} ms a step; ratio of medians {ratio:.3f}, "
            "median of the blocks' ratios {blocks:.3f}",
            norm=words.norm,
            plain_ms=plain * 1e3,
            evener_ms=evener * 1e3,
            ratio=evener / plain,
            blocks=ratios(*([median(block) for block in blocks[way]] for way in ("evener", "plain"))),
        )


if __name__ == "__main__":
    import_module("ddp_parity").main()  # ranks import what is defined here
