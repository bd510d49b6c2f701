"""hivemind's optimizer with local updates: peers average their weights after a number of samples over all of them."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

from course import BATCH, LEARNING_RATE, MOMENTUM, PORT, STEPS, Contestant, Course, Started


def launch(course: Course) -> Started:
    """Start the first peer, then the others with its address."""
    first, *others = course.nodes
    script = course.script
    started = course.start(first.name, script("hivemind_local", first.address, "-"))
    match = started.wait_for(r"peer (/ip4/\S+)", 120)
    course.start_nodes(lambda node: script("hivemind_local", node.address, match[1]), others)
    return started


CONTESTANT = Contestant(
    title="hivemind, local updates", package="hivemind", page="https://learning-at-home.readthedocs.io/en/latest/modules/optim.html",
    launch=launch,
)  # fmt: skip


def main() -> None:
    """Train until the process is ended."""
    import hivemind
    import torch
    from workload import Referee, Windows, make_model, train_step

    address, first_peer = sys.argv[3:5]
    peers = [] if first_peer == "-" else [first_peer]
    dht = hivemind.DHT(host_maddrs=[f"/ip4/{address}/tcp/{PORT}"], initial_peers=peers, start=True)
    if not peers:
        print(f"peer {dht.get_visible_maddrs()[0]}", flush=True)
    model, data = make_model(), Windows(Path(sys.argv[1]))
    small = BATCH // 7
    optimizer = hivemind.Optimizer(
        dht=dht, run_id="race", batch_size_per_step=small, target_batch_size=BATCH * STEPS, use_local_updates=True,
        params=model.parameters(), matchmaking_time=3.0, averaging_timeout=20.0, delay_state_averaging=True,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM),
    )  # fmt: skip
    if peers:
        optimizer.load_state_from_peers()
    referee, judged = Referee(Path(sys.argv[1])), 0
    draw = torch.Generator().manual_seed(int(address.rpartition(".")[2]))
    for _ in count():
        places = torch.randint(len(data.images), (small,), generator=draw)
        train_step(model, optimizer, data.images[places], data.labels[places])
        if optimizer.local_epoch > judged and not peers:
            judged = optimizer.local_epoch
            referee.judge(model, judged * STEPS)


if __name__ == "__main__":
    main()
