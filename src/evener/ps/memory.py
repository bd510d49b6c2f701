"""What a master writes down of a run in progress, so that killed and started again it goes on with it.

    run/server-VERSION.safetensors    weights, optimiser and samples, by `sync.snapshot`
    run/memory.msgpack                everything else; names the file above, and is written after it

So a crash at any moment leaves a pair that belongs together. Another thread writes; who is asked again before it has
finished does not wait for it.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from evener.atomic import atomic_write
from evener.errors import InvalidFile
from evener.ps.job import Job
from evener.ps.ledger import LedgerState
from evener.ps.roster import Roster
from evener.schema import Part
from evener.sync.snapshot import Snapshot, load_snapshot, save_snapshot

_MEMORY = "memory.msgpack"


class Memory(Part, frozen=True, kw_only=True):
    """Everything but the arrays.

    Attributes:
        server: name of the file with the arrays.
        job: of the run.
        ledger: what happened so far.
        used: samples of each epoch that has begun and not ended, that were learned from.
        due: epochs whose validation had not ended.
        begun: clock when work began, seconds since 1970; 0 if it had not.
        submitted: clock when the run was asked for.
        roster: who took part, with times counted from the moment of writing.
    """

    server: str
    job: Job
    ledger: LedgerState
    used: dict[int, int]
    due: tuple[int, ...]
    begun: float
    submitted: float
    roster: Roster


class Keeper:
    """Writes and reads the memory of one run at a time; close it.

    Args:
        folder: where it lies.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer = ThreadPoolExecutor(1, "evener-keeper")
        self._writing: Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether the last memory is still being written."""
        return self._writing is not None and not self._writing.done()

    def keep(self, memory: Memory, snapshot: Snapshot) -> None:
        """Begin to write.

        Raises:
            OSError: of the writing before this one.
        """
        self._wait()
        data = msgspec.msgpack.encode(memory)
        self._writing = self._writer.submit(self._write, memory.server, data, snapshot)

    def recall(self) -> tuple[Memory, Snapshot] | None:
        """The run that was in progress, if there was one.

        Raises:
            InvalidFile: what was written cannot be read.
        """
        path = self._folder / _MEMORY
        if not path.exists():
            return None
        try:
            memory = msgspec.msgpack.decode(path.read_bytes(), type=Memory)
        except (msgspec.DecodeError, OSError) as error:
            raise InvalidFile(f"cannot go on with the run in {path}: {error}; remove the file to leave it") from error
        return memory, load_snapshot(self._folder / memory.server)

    def forget(self) -> None:
        """The run is over."""
        with contextlib.suppress(OSError):  # it was not written, which was told
            self._wait()
        (self._folder / _MEMORY).unlink(missing_ok=True)
        self._remove_but("")

    def close(self) -> None:
        """Wait until everything is written, and end the thread."""
        self._writer.shutdown()

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, name: str, data: bytes, snapshot: Snapshot) -> None:
        save_snapshot(snapshot, self._folder / name)
        atomic_write(self._folder / _MEMORY, data, private=True)
        self._remove_but(name)

    def _remove_but(self, name: str) -> None:
        for path in self._folder.glob("server-*.safetensors"):
            if path.name != name:
                path.unlink(missing_ok=True)
