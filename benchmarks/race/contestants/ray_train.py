"""Ray Train: an elastic group of one worker a node, with equal shares; the head of the cluster does not train."""

from __future__ import annotations

import sys
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

from course import BATCH, PORT, STEPS, Contestant, Course, Node, Started

MEMORY = ("--object-store-memory", "100000000")
"""Bytes of a node's object store: by default it takes a third of the machine's memory, which these nodes share."""


def launch(course: Course) -> Started:
    """Start the head, a node of Ray on every host, and the program that starts the workers."""
    ray, head = (sys.executable, "-m", "ray.scripts.scripts", "start", *MEMORY), f"{course.master}:{PORT}"
    own = ("--node-ip-address", course.master, "--port", str(PORT), "--num-cpus", "0", "--block")
    course.start("master", [*ray, "--head", *own]).wait_for("Ray runtime started", 60)

    def command(node: Node) -> list[str]:
        return [*ray, "--address", head, "--node-ip-address", node.address, "--num-cpus", "1", "--block"]

    for started in course.start_nodes(command, course.nodes):
        started.wait_for("Ray runtime started", 60)
    return course.start("master", course.script("ray_train", head, len(course.all_nodes)))


CONTESTANT = Contestant(
    title="Ray Train", package="ray", page="https://docs.ray.io/en/latest/train/user-guides/elastic-training.html",
    launch=launch,
)  # fmt: skip


def main() -> None:
    """Start the workers, and wait for them."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(address=sys.argv[3])
    TorchTrainer(
        train,
        train_loop_config={"data": sys.argv[1]},
        scaling_config=ScalingConfig(num_workers=(1, int(sys.argv[4]))),
        run_config=RunConfig(storage_path=str(Path(sys.argv[2], "ray")), failure_config=FailureConfig(max_failures=-1)),
    ).fit()


def train(config: dict[str, Any]) -> None:
    """Train from the last checkpoint until the process is ended."""
    import ray.train
    import torch
    from workload import Referee, Windows, make_model, make_optimizer, train_step

    context, model, data, first = ray.train.get_context(), make_model(), Windows(Path(config["data"])), 0
    rank, size, optimizer = context.get_world_rank(), context.get_world_size(), make_optimizer(model.parameters())
    if kept := ray.train.get_checkpoint():
        with kept.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    parallel: Any = ray.train.torch.prepare_model(model)
    referee, begin, end = Referee(Path(config["data"])), BATCH * rank // size, BATCH * (rank + 1) // size
    for step in count(first):
        train_step(parallel, optimizer, *data.batch(step, begin, end))
        if (step + 1) % STEPS == 0:
            with tempfile.TemporaryDirectory() as folder:
                if rank == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                    torch.save(state, Path(folder, "state.pt"))
                    referee.judge(model, step + 1)
                ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(folder) if rank == 0 else None)


if __name__ == "__main__":
    main()
