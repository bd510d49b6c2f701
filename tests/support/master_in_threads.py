"""A master and every node in a thread of its own inside of one process, over a Unix socket."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from safetensors.numpy import load

from evener.agreements.layout import Flat
from evener.ps.client import MasterClient
from evener.ps.master.master import Master
from evener.ps.node.acceptance import Acceptance
from evener.ps.node.engine import Build
from evener.ps.node.node import Node
from evener.ps.node.node_part import NodeConfig
from evener.ps.protocol.config import MasterConfig, StateDir, Versions
from evener.ps.protocol.directions import ToNode
from evener.ps.protocol.job import Job
from evener.ps.protocol.messages import Header
from evener.ps.protocol.run_result import RunResult
from evener.records.events import RunEvent
from evener.records.profile import DeviceProfile
from evener.records.record import TrainRecord
from evener.wire.connect import open_connection
from evener.wire.connection import Connection
from evener.wire.identity import Address, make_identity
from evener.wire.limits import Limits
from support.linear_engine import Mood, build

VERSIONS = Versions("0", "3.11", "")
WAIT_SECONDS = 30.0


def wait_until(condition: Callable[[], Any], what: str = "what was awaited") -> Any:
    """What `condition` returns, once that is true."""
    until = time.monotonic() + WAIT_SECONDS
    while not (found := condition()):
        assert time.monotonic() < until, f"{what} did not happen"
        time.sleep(0.005)
    return found


class Stand:
    """A node in a thread."""

    accepts = Acceptance()
    speed = 1.0

    def __init__(self, plane: Plane, name: str, mood: Mood, data: Path | None = None) -> None:
        self.plane, self.name, self.mood = plane, name, mood
        self.said: list[str] = []
        self.error: BaseException | None = None
        self.connections: list[Connection[Header]] = []
        self._measured = DeviceProfile(
            node=name, device="cpu", model="", cores=1, memory_bytes=1, usable_memory_bytes=1
        )
        self._data = data
        self.thread = threading.Thread(target=self._run, name=f"node {name}")
        self.thread.start()

    def build(self) -> Build:
        """What makes the node's engines."""
        return build(self.mood)

    def cut(self) -> None:
        """Break the connection, as a network does."""
        self.connections[-1]._transport.sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        cache = self.plane.folder / f"cache-{self.name}"
        abilities = NodeConfig(
            self.name,
            "cpu",
            self.speed,
            self._data,
            cache,
            VERSIONS,
            lambda: self._measured,
            self.build(),
            accepts=self.accepts,
        )
        try:
            Node(abilities, self._dial, self.said.append).serve()
        except BaseException as error:
            self.error = error

    def _dial(self, seconds: float, patience: float) -> Connection[Header]:
        plane = self.plane
        limits = Limits(patience=patience)
        connection: Connection[Header] = open_connection(
            plane.address, plane.identity.token, ToNode, limits, seconds=seconds
        )
        self.connections.append(connection)
        return connection


class Plane:
    """A master, and the nodes that were told to join it."""

    def __init__(self, folder: Path, patience: float) -> None:
        self.folder, self.patience = folder, patience
        self.identity = make_identity(insecure=True)
        self.home = StateDir(folder / "home")
        self.address = Address(path=str(folder / "socket"))
        self.said: list[str] = []
        self.nodes: list[Stand] = []
        self.start_master()

    def start_master(self) -> None:
        config = MasterConfig(self.home, self.identity, VERSIONS, {"evener": "0"}, self.patience, self.said.append)
        self.master = Master(config)
        self.master.listen(self.address)
        self._errors: list[BaseException] = []
        self._stopping = threading.Event()
        self._serving = threading.Thread(target=self._serve, args=(self.master,), name="master")
        self._serving.start()

    def stop_master(self) -> None:
        """As Ctrl-C does."""
        self._stopping.set()
        with socket.socket(socket.AF_UNIX) as caller, contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            caller.connect(self.address.path)  # so that something happens there, unless it has ended already
        self._serving.join(WAIT_SECONDS)

    def join(self, name: str, mood: Mood | None = None, data: Path | None = None, kind: type[Stand] = Stand) -> Stand:
        """Another node, which has joined when this returns."""
        stand = kind(self, name, mood or Mood(), data)
        self.nodes.append(stand)
        wait_until(lambda: self._is_measured(name) or stand.error, f"that {name} joins")
        return stand

    def control(self) -> MasterClient:
        return MasterClient(self.address, self.identity.token, self.patience)

    def run(self, job: Job, weights: Flat) -> tuple[TrainRecord, dict[str, Any]]:
        """Record and weights of a run that is to be completed."""
        result, _ = self.watch(job, weights)
        assert (result.error, result.reason) == (None, "")
        return unpack(result)

    def watch(self, job: Job, weights: Flat, blobs: Any = ()) -> tuple[RunResult, list[RunEvent]]:
        words: list[RunEvent] = []
        with self.control() as control:
            run = control.submit(job, weights, blobs)
            return control.watch(run, words.append, lambda: None), words

    def ask(self) -> Any:
        with self.control() as control:
            return control.ask()

    def version(self) -> int:
        """Updates of the run in progress; -1 if there is none."""
        run = self.ask().run
        return -1 if run is None else int(run.version)

    def close(self) -> None:
        for stand in self.nodes:
            stand.mood.gate.set()
            stand.mood.validation_gate.set()
        if self._serving.is_alive():
            with self.control() as control:
                control.down()
        self._serving.join(WAIT_SECONDS)
        for stand in self.nodes:
            stand.thread.join(WAIT_SECONDS)
            assert not stand.thread.is_alive(), f"node {stand.name} goes on"
        if self._errors:
            raise self._errors[0]

    def _serve(self, master: Master) -> None:
        on_event = master._on_event

        def interrupted(event: Any) -> None:
            if self._stopping.is_set():
                raise KeyboardInterrupt
            on_event(event)

        master._on_event = interrupted  # type: ignore[method-assign]
        try:
            master.serve()
        except KeyboardInterrupt:
            pass
        except BaseException as error:
            self._errors.append(error)
        finally:
            master.close()

    def _is_measured(self, name: str) -> bool:
        node = self.master.nodes.by_name.get(name)
        return node is not None and node.peer is not None and node.profile is not None


@contextmanager
def plane(*names: str, patience: float = 10.0) -> Iterator[Plane]:
    """A master with these nodes; everything has ended afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="evener-"))  # short: the path of a Unix socket must be
    one = Plane(folder, patience)
    try:
        for name in names:
            one.join(name)
        yield one
    finally:
        one.close()
        shutil.rmtree(folder)


def unpack(result: RunResult) -> tuple[TrainRecord, dict[str, Any]]:
    return msgspec.json.decode(result.record, type=TrainRecord), load(bytes(result.weights))
