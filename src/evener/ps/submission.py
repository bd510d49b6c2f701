"""A run that a command asks for, until the master has all that belongs to it; one at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from evener.errors import EvenerError
from evener.ps.blob_transfer import BlobReceiver
from evener.ps.job import Job, decode_job
from evener.ps.messages import BlobChunk, FetchBlob, RunRejected, Send
from evener.sync.compression import as_bytes
from evener.sync.layout import Flat


class Submission(NamedTuple):
    """What was asked for.

    Attributes:
        peer: connection of the command.
        job: to be done.
        weights: to begin with.
        submitted: clock, seconds since 1970.
    """

    peer: int
    job: Job
    weights: Flat
    submitted: float


class Submissions:
    """Takes in runs; close it.

    Args:
        blobs: folder for code and data.
        send: to connections.
    """

    def __init__(self, blobs: Path, send: Send) -> None:
        self._receiver, self._send = BlobReceiver(blobs), send
        self._open: Submission | None = None

    def submit(self, peer: int, buffers: Sequence[memoryview], reason_to_wait: str) -> Submission | None:
        """A command wants a run; it is returned if nothing of it is missing.

        Args:
            peer: connection of the command.
            buffers: job and weights.
            reason_to_wait: why it cannot begin now; empty if it can.
        """
        try:
            job = decode_job(buffers[0])
            weights = Flat(job.layout, as_bytes(buffers[1]))
        except (msgspec.DecodeError, IndexError, EvenerError) as error:
            reason_to_wait = f"the run cannot be understood: {error}"
        if self._open is not None:
            reason_to_wait = reason_to_wait or "another command is submitting a run at this moment: try again"
        if reason_to_wait:
            self._send(peer, RunRejected(reason=reason_to_wait))
            return None
        self._open = Submission(peer, job, weights, time.time())
        self._ask(peer, self._receiver.request(job.blobs))
        return self._complete()

    def chunk(self, peer: int, chunk: BlobChunk, data: memoryview) -> Submission | None:
        """A piece of a blob came; the run is returned if it was the last one."""
        if self._open is None or self._open.peer != peer:
            return None
        try:
            self._ask(peer, self._receiver.receive(chunk, data))
        except (EvenerError, OSError) as error:
            self.close()
            self._send(peer, RunRejected(reason=str(error)))
        return self._complete()

    def left(self, peer: int) -> None:
        """A connection is gone, and with it what it was submitting."""
        if self._open is not None and self._open.peer == peer:
            self.close()

    def close(self) -> None:
        """Forget what has not become whole."""
        self._receiver.close()
        self._open = None

    def _ask(self, peer: int, fetches: Sequence[FetchBlob]) -> None:
        for fetch in fetches:
            self._send(peer, fetch)

    def _complete(self) -> Submission | None:
        found = self._open if self._receiver.is_complete else None
        if found is not None:
            self.close()
        return found
