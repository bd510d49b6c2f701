"""torchft over Gloo: every node is a replica group of one process, with an equal share."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from course import BATCH, PORT, STEPS, Contestant, Course, Node, Started


def launch(course: Course) -> Started:
    """Start a lighthouse, and a process per node."""
    options = ("--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000", "--bind")
    course.start("master", ["torchft_lighthouse", *options, f"{course.master}:{PORT}"])
    lighthouse, size = f"http://{course.master}:{PORT}", len(course.all_nodes)

    def command(node: Node) -> list[str]:
        return course.script("torchft_gloo", lighthouse, node.address, course.all_nodes.index(node), size)

    return course.start_nodes(command, course.nodes)[0]


CONTESTANT = Contestant(
    title="torchft", package="torchft", page="https://github.com/pytorch/torchft/blob/main/train_ddp.py",
    launch=launch,
)  # fmt: skip


def main() -> None:
    """Train until the process is ended."""
    import torch.distributed as dist
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
    from workload import Referee, Windows, make_model, make_optimizer, train_step

    lighthouse, address, number, size = sys.argv[3], sys.argv[4], int(sys.argv[5]), int(sys.argv[6])
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(PORT + 1), RANK="0", WORLD_SIZE="1")
    stores: Any = dist  # whose stores are not typed
    _store = stores.TCPStore(address, PORT + 1, is_master=True, wait_for_workers=False)
    data, model = Windows(Path(sys.argv[1])), make_model()
    optimizer: Any = None

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=1, load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"node{number}", timeout=timedelta(seconds=30), lighthouse_addr=lighthouse, hostname=address,
        store_addr=address, store_port=PORT + 1, rank=0, world_size=1,
    )  # fmt: skip
    parallel = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, make_optimizer(model.parameters()))
    referee, share, judged = Referee(Path(sys.argv[1])), BATCH // size, 0
    while True:
        step = manager.current_step()
        train_step(parallel, optimizer, *data.batch(step, share * number, share * (number + 1)))
        step = manager.current_step()
        if step % STEPS == 0 and step > judged and number == 0:
            referee.judge(model, step)
            judged = step


if __name__ == "__main__":
    main()
