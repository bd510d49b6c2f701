"""Results of finished runs on their way to commands: each is in memory once, and all of them have a limit.

    WatchRun -> a thread reads the result, if there is room for it -> RunFinished to every command that asked for it

A result stays in memory until the last command has taken it. Commands that ask for another one wait meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from evener.ps.master.access.quotas import MAX_WAITING
from evener.ps.protocol.messages import RunFinished, RunRejected, Send
from evener.ps.protocol.run_result import RunResult, load_result, result_bytes
from evener.records.errors import EvenerError
from evener.records.schema import shown
from evener.wire.errors import BadFrame
from evener.wire.frame import Buffer


class _Reading(NamedTuple):
    """A result that is being read."""

    run: str
    num_bytes: int
    result: Future[RunResult]


class FinishedRuns:
    """Sends results of finished runs; close it.

    Args:
        runs: folder of the results.
        send: sends a message to a connection.
    """

    def __init__(self, runs: Path, send: Send) -> None:
        self._runs, self._send = runs, send
        self._in_memory: WeakValueDictionary[str, NDArray[np.uint8]] = WeakValueDictionary()
        self._heads: dict[str, tuple[RunFinished, bytes | None]] = {}  # without a record that is in memory itself
        self._waiting: list[tuple[int, str]] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="evener-results")
        self._reading: _Reading | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of the results that commands have not taken, and of the one that is being read."""
        in_memory = list(self._in_memory.items())
        reading = 0 if self._reading is None else self._reading.num_bytes
        return reading + sum(array.nbytes + len(self._heads[run][1] or b"") for run, array in in_memory)

    def share(self, header: RunFinished, record: bytes, weights: bytes | memoryview) -> Sequence[Buffer]:
        """Return the buffers of a result, which count until the last command has taken them."""
        run = header.run
        self._in_memory[run] = array = np.asarray(memoryview(weights or record))
        self._heads[run] = header, record if weights else None
        return (record, array) if weights else (array, b"")

    def ask(self, peer: int, run: str) -> None:
        """Send a connection the result of a run as soon as it is read.

        Raises:
            BadFrame: the connection waits for too many results.
        """
        request = peer, run
        if request in self._waiting or self._sends(peer, run):
            return
        if sum(other == peer for other, _ in self._waiting) >= MAX_WAITING:
            raise BadFrame(f"too many requests: this peer waits for {MAX_WAITING} results")
        self._waiting.append(request)

    def tick(self, room: Callable[[], int]) -> None:
        """Send the result that has been read; read the next one that fits into the free memory, `room()` bytes."""
        if self._reading is not None:
            if not self._reading.result.done():
                return
            self._finish(self._reading)
        self._heads = {run: head for run, head in self._heads.items() if run in self._in_memory}
        self._waiting = [request for request in self._waiting if not self._sends(*request)]
        for run in dict.fromkeys(run for _, run in self._waiting):
            try:
                num_bytes = result_bytes(self._runs / run)
            except EvenerError as error:
                self._reject(run, f"there is no run {run}: {error}")
                continue
            if num_bytes <= room():
                self._reading = _Reading(run, num_bytes, self._thread.submit(load_result, self._runs / run))
                return
            if not self._in_memory:
                where = f"they are in {self._runs / run} on its machine"
                self._reject(run, f"the results of run {run} do not fit into the master's free memory; {where}")

    def is_awaited_by(self, peer: int) -> bool:
        """Return whether a connection waits for a result."""
        return any(other == peer for other, _ in self._waiting)

    def disconnected(self, peer: int) -> None:
        """Forget a connection that is gone."""
        self._waiting = [request for request in self._waiting if request[0] != peer]

    def close(self) -> None:
        """Stop reading."""
        self._thread.shutdown()

    def _finish(self, reading: _Reading) -> None:
        """Send the result that has been read to all that wait for it."""
        self._reading = None
        try:
            result = reading.result.result()
        except (EvenerError, MemoryError) as error:
            self._reject(reading.run, f"there is no run {reading.run}: {error}")
            return
        header = RunFinished(kind=result.kind, reason=shown(result.reason), run=reading.run)
        buffers = self.share(header, result.record, result.weights)
        for peer in self._take_waiting(reading.run):
            self._send(peer, header, buffers)

    def _sends(self, peer: int, run: str) -> bool:
        """Send a result that is in memory; return whether it is."""
        if (array := self._in_memory.get(run)) is None:
            return False
        header, record = self._heads[run]
        self._send(peer, header, (array, b"") if record is None else (record, array))
        return True

    def _reject(self, run: str, reason: str) -> None:
        for peer in self._take_waiting(run):
            self._send(peer, RunRejected(reason=shown(reason), run=run))

    def _take_waiting(self, run: str) -> list[int]:
        peers = [peer for peer, name in self._waiting if name == run]
        self._waiting = [request for request in self._waiting if request[1] != run]
        return peers
