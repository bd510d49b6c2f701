"""DistributedDataParallel with equal shares, restarted by torchrun from snapshots when nodes change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from course import BATCH, PORT, STEPS, Contestant, Course, Node, Started


def launch(course: Course, weight: Callable[[Node], float] = lambda _: 1.0) -> Started:
    """Start torchrun on every node; batches are divided by the nodes' weights."""

    def command(node: Node) -> list[str]:
        return [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", f"1:{len(course.all_nodes)}",
            "--nproc-per-node", "1", "--max-restarts", "1000", "--rdzv-backend", "c10d", "--rdzv-id", "race",
            "--rdzv-endpoint", f"{course.nodes[0].address}:{PORT}", "--local-addr", node.address,
            "--rdzv-conf", "last_call_timeout=30", *course.script("ddp", weight(node))[1:],
        ]  # fmt: skip

    return course.start_nodes(command, course.nodes)[0]


PAGE = "https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html"
CONTESTANT = Contestant(title="DDP, torchrun", package="torch", page=PAGE, launch=launch)


def main() -> None:
    """Train from the last snapshot until the process is ended."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from workload import Referee, Windows, make_model, make_optimizer, train_step

    folder, snapshot = Path(sys.argv[1]), Path(sys.argv[2], "snapshot.pt")
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    weights: list[float] = [0.0] * size
    dist.all_gather_object(weights, float(sys.argv[3]))
    begin, end = (round(BATCH * sum(weights[:last]) / sum(weights)) for last in (rank, rank + 1))
    model, data = make_model(), Windows(folder)
    parallel = DistributedDataParallel(model)
    optimizer, first = make_optimizer(parallel.parameters()), 0
    if snapshot.exists():
        state = torch.load(snapshot)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    # DDP takes the mean over the ranks: the loss of uneven shares is weighted, so that it is the mean over the batch
    parallel.register_comm_hook(None, lambda _, bucket: weighted(bucket, (end - begin) / BATCH))
    referee = Referee(folder)
    for step in count(first):
        train_step(parallel, optimizer, *data.batch(step, begin, end))
        if (step + 1) % STEPS == 0 and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, snapshot.with_suffix(".new"))
            snapshot.with_suffix(".new").replace(snapshot)
            referee.judge(model, step + 1)


def weighted(bucket: Any, weight: float) -> Any:
    """Return the sum of the gradients, each multiplied by the part of the batch that it is the mean of."""
    import torch.distributed as dist

    return dist.all_reduce(bucket.buffer().mul_(weight), async_op=True).get_future().then(lambda done: done.value()[0])


if __name__ == "__main__":
    main()
