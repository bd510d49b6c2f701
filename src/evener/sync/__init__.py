"""How replicas agree: the parameter server and its workers as values and state machines, without sockets or torch.

Agreement, Workload          what was agreed on
Server                       messages in, answers and updates out
Replica, work                the worker's side, between an Engine and an Exchange
Layout, Flat                 a model's state in one piece of memory
save_snapshot, load_snapshot the server's state on disk
"""

from typing import TYPE_CHECKING

from evener.lazy import lazily

if TYPE_CHECKING:
    from evener.sync.agreement import Adam, Agreement, Compression, Outer, Rate, Sgd
    from evener.sync.cores import Cores
    from evener.sync.family import FAMILY, asynchronous, averaging, bounded, diloco, synchronous
    from evener.sync.flat import Flat, flat_of
    from evener.sync.layout import Entry, Layout, layout_of
    from evener.sync.merge.stream import Merging
    from evener.sync.messages import Answer, Lease, Outcome, Push, Reply, Tally, Update
    from evener.sync.samples import Portion, positions
    from evener.sync.server import Server
    from evener.sync.snapshot import ServerState, Snapshot, load_snapshot, save_snapshot
    from evener.sync.worker import Engine, Exchange, Replica, work
    from evener.sync.workload import Workload

__all__ = [
    "FAMILY",
    "Adam",
    "Agreement",
    "Answer",
    "Compression",
    "Cores",
    "Engine",
    "Entry",
    "Exchange",
    "Flat",
    "Layout",
    "Lease",
    "Merging",
    "Outcome",
    "Outer",
    "Portion",
    "Push",
    "Rate",
    "Replica",
    "Reply",
    "Server",
    "ServerState",
    "Sgd",
    "Snapshot",
    "Tally",
    "Update",
    "Workload",
    "asynchronous",
    "averaging",
    "bounded",
    "diloco",
    "flat_of",
    "layout_of",
    "load_snapshot",
    "positions",
    "save_snapshot",
    "synchronous",
    "work",
]

_HOMES = {
    "Adam": "agreement",
    "Agreement": "agreement",
    "Answer": "messages",
    "Compression": "agreement",
    "Cores": "cores",
    "Engine": "worker",
    "Entry": "layout",
    "Exchange": "worker",
    "FAMILY": "family",
    "Flat": "flat",
    "Layout": "layout",
    "Lease": "messages",
    "Merging": "merge.stream",
    "Outcome": "messages",
    "Outer": "agreement",
    "Portion": "samples",
    "Push": "messages",
    "Rate": "agreement",
    "Replica": "worker",
    "Reply": "messages",
    "Server": "server",
    "ServerState": "snapshot",
    "Sgd": "agreement",
    "Snapshot": "snapshot",
    "Tally": "messages",
    "Update": "messages",
    "Workload": "workload",
    "asynchronous": "family",
    "averaging": "family",
    "bounded": "family",
    "diloco": "family",
    "flat_of": "flat",
    "layout_of": "layout",
    "load_snapshot": "snapshot",
    "positions": "samples",
    "save_snapshot": "snapshot",
    "synchronous": "family",
    "work": "worker",
}

__getattr__ = lazily(__name__, _HOMES)
