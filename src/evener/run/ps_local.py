"""A private master and slowed nodes on this machine, for one command: they end with it, however it ends."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection as Pipe
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from evener.errors import NodeLost
from evener.host import environment
from evener.launch.nodes import LocalNode
from evener.launch.parent import end_with_parent
from evener.ps.master import Master, MasterConfig
from evener.ps.node import Node
from evener.ps.node_config import NodeConfig, versions_here
from evener.ps.numpy_benchmark import profile_numpy
from evener.ps.state_dir import StateDir
from evener.run.ps_backends import build_engine
from evener.run.ps_node import connector
from evener.wire.identity import Address, Identity, Token, make_identity

_PRELOAD = ["torch", "evener.ps.torch_backend", "evener.run.ps_local", "evener.run.precision"]
_START_SECONDS = 60.0
_MEASURE_SECONDS = 0.2
_PAUSE_SECONDS = 0.05


class LocalCluster:
    """The processes of one; end it.

    Args:
        folder: for what they leave on the disk.
        patience: seconds of silence after which one of them is given up.

    Attributes:
        address: of the master.
        token: with which it is joined.
    """

    def __init__(self, folder: Path, patience: float) -> None:
        self._folder, self._patience = folder, patience
        self._identity = make_identity(insecure=True)  # nothing leaves this machine, and this user's own socket
        self.address, self.token = Address(path=str(folder / "master")), self._identity.token
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._started: list[ForkServerProcess] = []
        self._nodes: list[ForkServerProcess] = []

    def start(self, nodes: Sequence[LocalNode]) -> None:
        """Start the master and, when it listens, the nodes."""
        ours, theirs = self._context.Pipe(duplex=False)
        self._start("master", _be_master, self._folder, self._identity, self.address, self._patience, theirs)
        theirs.close()
        if not ours.poll(_START_SECONDS):
            raise NodeLost(f"the master of the local nodes did not start within {_START_SECONDS:.0f} s")
        ours.close()
        cache, token = self._folder / "cache", self.token.text
        self._nodes = [self._start(node.name, _be_node, node, cache, self.address, token) for node in nodes]

    def wait_for_nodes(self, joined: Callable[[], int]) -> None:
        """Return when all nodes have joined, so that work is divided among all from the beginning.

        Args:
            joined: how many have.
        """
        while joined() < len(self._nodes):
            if any(not node.is_alive() for node in self._nodes):
                raise NodeLost("a local node ended before it had joined")
            time.sleep(_PAUSE_SECONDS)

    def check(self) -> None:
        """Raises NodeLost when no node is left: nobody would ever come back here."""
        if not any(node.is_alive() for node in self._nodes):
            raise NodeLost("all local nodes have ended")

    def end(self) -> None:
        """End all processes."""
        for process in self._started:
            process.kill()
        for process in self._started:
            process.join()
            process.close()

    def _start(self, name: str, target: Any, *words: Any) -> ForkServerProcess:
        process = self._context.Process(target=target, args=words, name=name)
        process.start()
        self._started.append(process)
        return process


@contextmanager
def local_cluster(nodes: Sequence[LocalNode], patience: float) -> Iterator[LocalCluster]:
    """A master and `nodes`, which are gone when the block is left, or when this process dies."""
    with tempfile.TemporaryDirectory(prefix="evener-", ignore_cleanup_errors=True) as folder:
        cluster = LocalCluster(Path(folder), patience)
        try:
            cluster.start(nodes)
            yield cluster
        finally:
            cluster.end()


def _be_master(folder: Path, identity: Identity, address: Address, patience: float, ready: Pipe) -> None:
    _belong_to_parent()
    master = Master(MasterConfig(StateDir(folder), identity, versions_here(), environment(), patience, _keep_silent))
    master.listen(address)
    ready.send_bytes(b"listening")
    ready.close()
    master.serve()


def _be_node(node: LocalNode, cache: Path, address: Address, token: str) -> None:
    _belong_to_parent()
    if node.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, node.cores)
    if node.threads:
        _limit_threads(node.threads)
    speed = node.speed_at(0)
    abilities = NodeConfig(
        name=node.name,
        device=node.device,
        speed=speed,
        data=None,
        cache=cache,
        versions=versions_here(),
        measure=partial(profile_numpy, node.name, speed, _MEASURE_SECONDS),
        build=build_engine,
    )
    with connector(address, Token.parse(token)) as dial:
        Node(abilities, dial, _keep_silent).serve()


def _limit_threads(threads: int) -> None:
    """Have NumPy and PyTorch compute in so many: on a core of the node's own, more of them wait for each other."""
    from threadpoolctl import threadpool_limits  # here, for it changes the environment when it is imported

    threadpool_limits(threads)
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.set_num_threads(threads)


def _keep_silent(_: str) -> None:
    """The command that the user typed tells what happens."""


def _belong_to_parent() -> None:
    """End with the command; Ctrl-C is that one's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
