"""A private master and nodes on this machine for one command; they end with it, however it ends."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from evener.benchmark.numpy_device import profile_numpy
from evener.commands.engines import build_engine, build_thin_engine
from evener.commands.join import connector
from evener.launch.nodes import NodeSpec
from evener.launch.parent import Parent
from evener.launch.processes import LocalProcess, LocalProcesses
from evener.ps.client import MasterClient
from evener.ps.master.master import Master
from evener.ps.node.node import Node
from evener.ps.node.node_part import NodeConfig
from evener.ps.protocol.config import MasterConfig, StateDir, versions_here
from evener.records.errors import NodeLost
from evener.system.host import environment
from evener.wire.identity import Address, Identity, Token, make_identity

_PRELOAD = [
    "torch",
    "torch._dynamo",
    "evener.ps.node.torch_backend",
    "evener.commands.private_master",
    "evener.training.context",
]
_PRELOAD_THIN = ["evener.ps.node.thin_backend", "evener.commands.private_master"]
_START_SECONDS = 60.0
_MEASURE_SECONDS = 0.2
_PAUSE_SECONDS = 0.05


class LocalCluster:
    """A running master and its nodes.

    Args:
        processes: the master's first, then the nodes'.
        address: of the master.
        token: for joining it.
    """

    def __init__(self, processes: Sequence[LocalProcess], address: Address, token: Token) -> None:
        self._processes, self.address, self.token = processes, address, token

    def wait_for_nodes(self, client: MasterClient, *, until_measured: bool = False) -> None:
        """Wait until all nodes have joined, so that work is divided among all from the beginning.

        Args:
            client: of the master.
            until_measured: whether to wait for their scores, too.
        """
        until, wanted = time.monotonic() + _START_SECONDS, len(self._processes) - 1
        while True:
            here = [node for node in client.ask().nodes if node.state == "present"]
            joined = sum(node.score is not None or not until_measured for node in here)
            if joined >= wanted:
                return
            self.require_all_alive()
            if time.monotonic() > until:
                raise NodeLost(f"only {joined} of {wanted} local nodes joined within {_START_SECONDS:.0f} s")
            time.sleep(_PAUSE_SECONDS)

    def require_all_alive(self) -> None:
        """Raise NodeLost if any of the processes has ended."""
        for one in self._processes:
            if one.has_ended:
                raise NodeLost(f"{one.process.name} {one.ending}", (one.process.name,))

    def require_any_alive(self) -> None:
        """Raise NodeLost if all nodes have ended: local nodes never return."""
        if all(node.has_ended for node in self._processes[1:]):
            raise NodeLost("all local nodes have ended")


@contextmanager
def local_cluster(
    nodes: Sequence[NodeSpec],
    patience: float,
    *,
    thin: bool = False,
    data: Path | None = None,
    encrypted: bool = False,
) -> Iterator[LocalCluster]:
    """Start a master and `nodes`, which end with the block, or when this process dies.

    Args:
        nodes: to start once the master listens.
        patience: seconds without a message after which a node counts as lost.
        thin: whether they compute without PyTorch, and use TCP, as on separate machines.
        data: folder of the nodes' data.
        encrypted: whether they use TLS, though nothing leaves this machine.

    Raises:
        NodeLost: the master does not start.
        MissingExtra: `cryptography` is not installed, and `encrypted` is true.
    """
    identity = make_identity(insecure=not encrypted)
    with (
        tempfile.TemporaryDirectory(prefix="evener-", ignore_cleanup_errors=True) as name,
        LocalProcesses(_PRELOAD_THIN if thin else _PRELOAD) as processes,
    ):
        folder = Path(name)
        address = Address("127.0.0.1", 0) if thin else Address(path=str(folder / "master"))
        master = processes.start("master", _be_master, folder, identity, address, patience)
        address = Address.parse(_listening_address(processes, master))
        arguments = (thin, data, folder / "cache", address, identity.token.text)
        started = [
            processes.start(node.name, _be_node, node, *arguments, cores=node.cores, threads=node.threads)
            for node in nodes
        ]
        yield LocalCluster([master, *started], address, identity.token)


def _listening_address(processes: LocalProcesses, master: LocalProcess) -> str:
    """Wait for the address on which the master listens."""
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until and not master.has_failed:
        for _, data in processes.receive(_PAUSE_SECONDS):
            return data.decode()
    if master.failure is not None:
        raise master.failure.as_error()
    raise NodeLost(f"the master of the local nodes did not start within {_START_SECONDS:.0f} s")


def _be_master(parent: Parent, folder: Path, identity: Identity, address: Address, patience: float) -> None:
    state = StateDir(folder)
    master = Master(MasterConfig(state, identity, versions_here(), environment(), patience, _keep_silent))
    parent.send(str(master.listen(address)).encode())
    master.serve()


def _be_node(
    _parent: Parent, node: NodeSpec, thin: bool, data: Path | None, cache: Path, address: Address, token: str
) -> None:
    speed = node.speed_at(0)
    config = NodeConfig(
        name=node.name,
        device=node.device,
        speed=speed,
        data=data,
        cache=cache,
        versions=versions_here(),
        measure=partial(profile_numpy, node.name, speed, _MEASURE_SECONDS),
        build=build_thin_engine if thin else build_engine,
    )
    with connector([address], Token.parse(token)) as dial:
        Node(config, dial, _keep_silent).serve()


def _keep_silent(_: str) -> None:
    """Print nothing: the user's command shows events."""
