"""Who takes part: the processes of a run on this machine or under torchrun, and the watch over them."""

from typing import TYPE_CHECKING

from evener.lazy import lazily

if TYPE_CHECKING:
    from evener.cluster.alone import run_alone
    from evener.cluster.local import run_local
    from evener.cluster.nodes import LocalNode, local_nodes, parse_local_nodes
    from evener.cluster.seat import Seat, run_seat, seat_from_environment
    from evener.cluster.watch import Watch

__all__ = [
    "LocalNode",
    "Seat",
    "Watch",
    "local_nodes",
    "parse_local_nodes",
    "run_alone",
    "run_local",
    "run_seat",
    "seat_from_environment",
]

_HOMES = {
    "LocalNode": "nodes",
    "Seat": "seat",
    "Watch": "watch",
    "local_nodes": "nodes",
    "parse_local_nodes": "nodes",
    "run_alone": "alone",
    "run_local": "local",
    "run_seat": "seat",
    "seat_from_environment": "seat",
}

__getattr__ = lazily(__name__, _HOMES)
