"""The environment of a rank whose process was started on this machine: for `run_local`, or for a master by a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from evener.comm.signed_store import SignedStore
from evener.launch.nodes import LocalNode
from evener.launch.parent import Parent
from evener.launch.rank_environment import RankEnvironment
from evener.launch.rank_heartbeat import RankHeartbeat
from evener.membership.control_channel import ControlChannel
from evener.records.events import encode_events


def hosted_environment(
    parent: Parent,
    open_store: Callable[[], SignedStore],
    *,
    rank: int,
    nodes: Sequence[LocalNode],
    patience: float,
    process: int | None,
    is_late: bool = False,
    receive: Callable[[], bytes] | None = None,
    absence: float = 0.0,
) -> RankEnvironment:
    """Return the environment of a rank in its process.

    Args:
        parent: the process that started it.
        open_store: opens a connection to the rendezvous store of the ranks.
        rank: of this process.
        nodes: one a rank, in order.
        patience: seconds of silence after which a rank is lost.
        process: number of this process in an elastic run; None in others.
        is_late: whether the elastic run is already under way.
        receive: waits for the next message of the coordinator; None if `parent` is the coordinator.
        absence: seconds that the coordinator and the store may be gone.
    """
    env = RankEnvironment(
        rank=rank,
        nodes=list(nodes),
        device=torch.device(nodes[rank].device),
        patience=patience,
        notify=lambda event: parent.send(encode_events([event])),
        store=open_store(),
        end=parent.end,
    )
    parent.on_stop(env.request_stop)
    if process is not None:
        env.line = ControlChannel(
            process=process,
            node=env.node.name,
            is_late=is_late,
            send=parent.say,
            receive=receive or parent.hear,
            open_store=open_store,
            end=parent.end,
            patience=patience,
            absence=absence,
        )
    if not is_late and len(nodes) > 1:
        env.heartbeat = RankHeartbeat(
            open_store(),
            rank=rank,
            nodes=env.names,
            patience=patience,
            on_lost=env.end,
            store_patience=absence or None,
        )
    return env
