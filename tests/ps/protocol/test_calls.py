"""What a contribution costs the master: Python calls, and files that they lie in."""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import numpy as np
import pytest

import evener
from evener.agreements.layout import Flat, layout_of
from evener.agreements.messages import Push
from evener.agreements.settings import Sgd, Workload, synchronous
from evener.ps.master.handlers import Handlers
from evener.ps.master.master import Master
from evener.ps.protocol.config import MasterConfig, StateDir
from evener.ps.protocol.directions import ToNode
from evener.ps.protocol.job import Job, encode_job
from evener.ps.protocol.messages import (
    PROTOCOL_VERSION,
    Contribution,
    Header,
    Join,
    Prepare,
    Ready,
    ServerReply,
    SubmitRun,
)
from evener.records.profile import DeviceProfile
from evener.wire.connect import open_connection
from evener.wire.connection import Connection
from evener.wire.identity import Address, make_identity
from evener.wire.limits import Limits
from support.master_in_threads import VERSIONS

PACKAGE = str(Path(evener.__file__).parent)
MOST_CALLS, MOST_FILES = 120, 19
NODES, WARM_UP, ROUNDS, PARAMETERS = 3, 5, 20, 1000


class Plane:
    """A master and nodes in one thread, each of which moves when it is told to."""

    def __init__(self, folder: Path) -> None:
        identity = make_identity(insecure=True)
        self.master = Master(MasterConfig(StateDir(folder), identity, VERSIONS, {}, 60.0, lambda _: None))
        self.address = self.master.listen(Address(path=str(folder / "socket")))
        self.token = identity.token
        self.layout = layout_of({"w": np.zeros(PARAMETERS, np.float32)})
        self.gradient = Flat(self.layout).memory

    def connect(self) -> Connection[Header]:
        """A connection, while the master steps."""
        found: list[Connection[Header]] = []
        dialling = threading.Thread(
            target=lambda: found.append(open_connection(self.address, self.token, ToNode, Limits(patience=60.0)))
        )
        dialling.start()
        while dialling.is_alive():
            self.master.step()
        return found[0]

    def next_of(self, connection: Connection[Header], kind: type[Any]) -> Any:
        """The next message of a type."""
        while True:
            while not connection.wait(0.0):
                self.master.step()
            if isinstance(header := connection.receive().header, kind):
                return header

    @property
    def version(self) -> int:
        (run,) = self.master._scheduler.trainings
        return run.server.version

    def job(self) -> Job:
        return Job(
            run="counted",
            task="none",
            title="none",
            agreement_name="sync",
            agreement=synchronous(batch=96, outer=Sgd(learning_rate=0.01)),
            workload=Workload(num_samples=96 * 10**6, num_updates=10**6),
            layout=self.layout,
        )


@contextmanager
def begun() -> Iterator[tuple[Plane, list[Connection[Header]]]]:
    """A run with all nodes at work."""
    folder = Path(tempfile.mkdtemp(prefix="evener-"))
    plane = Plane(folder)
    try:
        nodes = []
        for k in range(NODES):
            connection = plane.connect()
            nodes.append(connection)
            profile = DeviceProfile(
                node=f"n{k}", device="cpu", model="", cores=1, memory_bytes=1, usable_memory_bytes=1
            )
            connection.send(
                Join(
                    protocol=PROTOCOL_VERSION,
                    name=f"n{k}",
                    incarnation=1,
                    evener="0",
                    python="3.11",
                    torch="",
                    clock=0.0,
                    device="cpu",
                    profile=profile,
                )
            )
        command = plane.connect()
        command.send(SubmitRun(), [encode_job(plane.job()), plane.gradient])
        for connection in nodes:
            plane.next_of(connection, Prepare)
            connection.send(Ready(run="counted", unit_seconds=1e-5))
        yield plane, nodes
        command.close()
        for connection in nodes:
            connection.close()
    finally:
        plane.master.close()
        shutil.rmtree(folder)


@pytest.mark.posix
def test_contribution_takes_few_calls_in_few_files() -> None:
    """Counts the 'call' events of Python functions in the master's thread, generators and comprehensions included.

    The calls are all that the master does from one synchronous round to the next, divided by the contributions of a
    round: from the socket being ready, with all bytes of a contribution in the kernel, to the answer being handed to
    the kernel; the round's update and leases are in it. The median round counts: on a slow machine, some have more of
    what the master does by the clock.

    The files are those of the package that are crossed while a contribution is dealt with whose last byte is in its
    place; the wire's own, which sends the answers, are not among them.
    """
    calls: Counter[str] = Counter()
    of_rounds: list[int] = []
    files: set[str] = set()
    is_between = False

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal is_between
        code = frame.f_code
        if code is Handlers.on_part.__code__ and event in ("call", "return"):
            is_between = event == "call" and bool(frame.f_locals["is_whole"])
        if event != "call":
            return
        calls[code.co_qualname] += 1
        if is_between and code.co_filename.startswith(PACKAGE) and "/wire/" not in code.co_filename:
            files.add(code.co_filename)

    with begun() as (plane, nodes):
        leases = [plane.next_of(node, ServerReply).answer.lease for node in nodes]
        for turn in range(WARM_UP + ROUNDS):
            for lease, node in zip(leases, nodes, strict=True):
                push = Push(number=lease.number, seconds=lease.num_samples * 1e-5, loss=1.0)
                node.send(Contribution(run="counted", push=push), [plane.gradient])
            sys.setprofile(count if turn >= WARM_UP else None)
            while plane.version == turn:
                plane.master.server.poll(0.0)
            plane.master._tick()
            sys.setprofile(None)
            of_rounds.append(sum(calls.values()))
            leases = [plane.next_of(node, ServerReply).answer.lease for node in nodes]
    of_rounds = [after - before for before, after in pairwise(of_rounds[WARM_UP - 1 :])]
    assert median(of_rounds) / NODES <= MOST_CALLS, calls.most_common(40)
    assert 0 < len(files) <= MOST_FILES, sorted(files)
