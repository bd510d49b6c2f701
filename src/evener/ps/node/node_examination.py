"""A node's part of an examination: examine the machine, listen for the other nodes, connect to them.

It runs in a thread of its own, so that the node's work for a run continues.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import replace

from evener.doctor.examine import examine
from evener.doctor.facts import MachineFacts
from evener.doctor.interface_checks import listening_addresses
from evener.doctor.peers import DataFacts, Link, Unreached
from evener.doctor.probe import Listeners, measure_link, probe
from evener.ps.node.acceptance import Acceptance
from evener.ps.node.blob_writer import BlobWriter
from evener.ps.protocol.blob import blob_folder
from evener.ps.protocol.examination_messages import (
    Examine,
    Examined,
    LinksReport,
    NodeReport,
    Place,
    Probed,
    ProbeNodes,
    TaskQuestion,
    decode_part,
    encode_part,
)
from evener.ps.protocol.messages import Header
from evener.records.errors import EvenerError
from evener.records.schema import shown
from evener.wire.errors import CannotJoin, ConnectionLost
from evener.wire.frame import Buffer

Look: TypeAlias = Callable[[TaskQuestion | None, Path | None], tuple[MachineFacts, DataFacts | None]]
"""Returns the facts of this machine, and the data of a task whose code is in a folder, if there is one."""
_CONNECT_SECONDS = 3.0
_RATE_SECONDS = 0.1
"""Time for which bytes are received to measure a rate."""
_MAX_THREADS = 32


def look_at_machine(_question: TaskQuestion | None, _code: Path | None) -> tuple[MachineFacts, DataFacts | None]:
    """Return the facts of the machine alone, without folders."""
    return examine({}), None


class NodeExaminer:
    """Examinations of this node; close it.

    Args:
        look: see above.
        cache: folder of received files.
        accepts: tasks that the node loads.
        send: sends a message to the master, from any thread.
    """

    def __init__(
        self, look: Look, cache: Path, accepts: Acceptance, send: Callable[[Header, Sequence[Buffer]], None]
    ) -> None:
        self._look, self._blobs, self._accepts, self._send = look, cache / "blobs", accepts, send
        self._probes: queue.SimpleQueue[tuple[ProbeNodes, list[Place]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()

    def examine(self, request: Examine, buffers: Sequence[memoryview]) -> None:
        """Begin an examination, and end an earlier one."""
        self.close()
        self._probes, self._is_over = queue.SimpleQueue(), threading.Event()
        question = decode_part(buffers[0], TaskQuestion) if buffers else None
        code = bytes(buffers[1]) if buffers else b""
        self._thread = threading.Thread(
            target=self._examine, args=(request, question, code), daemon=True, name="evener-examine"
        )
        self._thread.start()

    def probe(self, request: ProbeNodes, buffers: Sequence[memoryview]) -> None:
        """Probe the other nodes, which listen now."""
        self._probes.put((request, decode_part(buffers[0], list[Place])))

    def close(self) -> None:
        """End the examination; a task that is being loaded ends by itself."""
        self._probes.put(None)
        self._is_over.set()

    def _examine(self, request: Examine, question: TaskQuestion | None, code: bytes) -> None:
        probes, is_over, until = self._probes, self._is_over, time.monotonic() + request.seconds
        facts, data = self._facts(question, code)
        with Listeners(listening_addresses(facts.network)) as listeners:
            places = tuple(
                Place(machine=facts.machine, address=address, port=port) for address, port in listeners.places
            )
            report = NodeReport(facts=facts, places=places, data=data)
            with contextlib.suppress(CannotJoin, ConnectionLost, queue.Empty):  # the receiving thread reports it
                self._send(Examined(number=request.number, clock=time.time()), (encode_part(report),))
                message = probes.get(timeout=max(0.0, until - time.monotonic()))
                if message is not None:
                    links = links_to(message[1], min(until, time.monotonic() + message[0].seconds))
                    self._send(Probed(number=request.number), (encode_part(links),))
            is_over.wait(max(0.0, until - time.monotonic()))  # until then others may connect

    def _facts(self, question: TaskQuestion | None, code: bytes) -> tuple[MachineFacts, DataFacts | None]:
        """Return facts of this machine, with any problem of the task, and facts of the task's data."""
        if question is None:
            return self._look(None, None)
        objection = self._accepts.objection(question)
        try:
            folder = self._keep(question.code, code) if question.code and not objection else None
        except (EvenerError, OSError) as error:
            objection = f"its code cannot be written: {error}"
        if not objection:
            return self._look(question, folder)
        return replace(self._look(None, None)[0], task_problem=shown(objection)), None

    def _keep(self, digest: str, stream: bytes) -> Path:
        """Unpack a task's files from their stream; return their folder."""
        folder = blob_folder(self._blobs, digest)
        if not folder.exists():
            writer = BlobWriter(digest, self._blobs)
            try:
                writer.add_head(stream)
                writer.finish()
            finally:
                writer.close()
        return folder


def links_to(places: Sequence[Place], until: float) -> LinksReport:
    """Connect to all at once to see which can be reached; then measure one after the other while there is time."""
    if not places:
        return LinksReport()
    soon = min(until, time.monotonic() + _CONNECT_SECONDS)
    with ThreadPoolExecutor(min(_MAX_THREADS, len(places)), thread_name_prefix="evener-probe") as pool:
        results = list(pool.map(lambda place: probe(place.address, place.port, soon), places))
    failed = [
        Unreached(machine=place.machine, address=place.address, port=place.port, reason=result)
        for place, result in zip(places, results, strict=True)
        if isinstance(result, str)
    ]
    links = []
    for place, result in zip(places, results, strict=True):
        if not isinstance(result, str) and time.monotonic() + 2 * _RATE_SECONDS < until:
            link = measure_link(place.machine, place.address, place.port, until, _RATE_SECONDS)
            links += [link] if isinstance(link, Link) else []
    return LinksReport(links=tuple(links), unreached=tuple(failed))
