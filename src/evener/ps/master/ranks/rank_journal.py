"""Journal of a run whose ranks work together, from which a restarted master continues it.

    run/ranks-RUN.journal    records, each after its length and its CRC-32

The journal is truncated after the last complete record; an incomplete one was being written when the master died, or is
damaged. On a full disk the journal is emptied, since an older state would count backwards.

The weights are with the ranks. The journal holds the values of their rendezvous and the generations; numbers of
generations and of processes never decrease. Only the first write of a value is recorded; later writes are heartbeats.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO, TypeAlias

import msgspec

from evener.membership.generation import Generation
from evener.ps.protocol.config import StateDir
from evener.ps.protocol.rank_messages import RankJob
from evener.records.atomic import atomic_write
from evener.records.decoding import msgpack_decoder
from evener.records.record import Epoch
from evener.records.schema import Amount, Part

_HEAD = struct.Struct("<II")
"""Bytes of a record, and their CRC-32."""
_FILE = "ranks-{}.journal"
_MIN_COMPACTED_BYTES = 4 * 2**20


class RunStart(Part, frozen=True, kw_only=True, tag=True):
    """A start of the run, which makes earlier processes and values void.

    Attributes:
        job: job to do.
        secret: secret of the processes; empty before there are any.
    """

    job: RankJob
    secret: bytes


class StoredValue(Part, frozen=True, kw_only=True, tag=True):
    """A value that a process stored for the others."""

    key: str
    value: bytes


class Saved(Part, frozen=True, kw_only=True, tag=True):
    """A complete checkpoint at the master.

    Attributes:
        step: step after which it was written.
        digest: digest of its blob.
    """

    step: Amount
    digest: str


class Roster(Part, frozen=True, kw_only=True, tag=True):
    """The process of each node.

    Attributes:
        names: names of the nodes.
        numbers: numbers of their processes.
        given_up: numbers of lost processes, without which the run continues.
        next: number of the next process.
        generation: latest generation; None before all ranks have connected.
    """

    names: tuple[str, ...]
    numbers: tuple[Amount, ...]
    given_up: tuple[Amount, ...]
    next: Amount
    generation: Generation | None


class ReportedEpoch(Part, frozen=True, kw_only=True, tag=True):
    """The end of an epoch, as the ranks have reported it."""

    epoch: Epoch


class Assigned(Part, frozen=True, kw_only=True, tag=True):
    """The nodes that take over when the ranks have stopped; the next start has them."""

    nodes: tuple[str, ...]


Record: TypeAlias = RunStart | StoredValue | Saved | Roster | ReportedEpoch | Assigned
_decoder = msgpack_decoder(Record)


class JournalState(Part, frozen=True, kw_only=True):
    """State of a journal: the last start, the values since, the last roster, the last checkpoint, all epochs, and the
    nodes that were assigned since the start; None without any.
    """

    begun: RunStart
    values: dict[str, bytes]
    roster: Roster
    saved: Saved | None = None
    epochs: tuple[Epoch, ...] = ()
    assigned: tuple[str, ...] | None = None


def unfinished_ranks(home: StateDir) -> list[str]:
    """Return the names of the runs whose ranks worked together under the last master of this state folder."""
    prefix, suffix = _FILE.split("{}")
    return sorted(path.name.removeprefix(prefix).removesuffix(suffix) for path in home.run.glob(_FILE.format("*")))


def roster_of(numbers: Mapping[str, int], given_up: Sequence[int], next: int, generation: Generation | None) -> Roster:
    """Return a `Roster`; `numbers` has the processes by node."""
    return Roster(
        names=tuple(numbers),
        numbers=tuple(numbers.values()),
        given_up=tuple(given_up),
        next=next,
        generation=generation,
    )


class RankJournal:
    """The journal of one run; close it.

    Args:
        home: state folder of the master.
        run: name of the run.
        notify: shows a message to the master's user.
    """

    def __init__(self, home: StateDir, run: str, notify: Callable[[str], None]) -> None:
        self._home, self._path, self._notify = home, home.run / _FILE.format(run), notify
        self._file: BinaryIO | None = None
        self._is_failing, self._needed_bytes = False, 0

    def add(self, record: Record) -> None:
        """Append a record; a full disk is a warning, and the next start of the run tries again."""
        if self._is_failing and not isinstance(record, RunStart):
            return
        data = msgspec.msgpack.encode(record)
        try:
            self._write(_HEAD.pack(len(data), zlib.crc32(data)) + data)
            self._is_failing = False
            self._compact_if_due()
        except OSError as error:
            self._notify(f"warning: cannot save the run ({error.strerror}): a restarted master will not continue it")
            self._is_failing = True
            if self._file is not None:
                self._file.truncate(0)

    def _compact_if_due(self) -> None:
        """Limit the file to twice its necessary size plus a few megabytes, since rosters are repeated."""
        assert self._file is not None
        if self._file.tell() < _MIN_COMPACTED_BYTES + 2 * self._needed_bytes or (state := self.load()) is None:
            return
        records: list[Record] = [
            state.begun,
            *(StoredValue(key=key, value=value) for key, value in state.values.items()),
        ]
        records += [state.roster, *([] if state.saved is None else [state.saved])]
        records += [ReportedEpoch(epoch=epoch) for epoch in state.epochs]
        records += [] if state.assigned is None else [Assigned(nodes=state.assigned)]
        encoded = [msgspec.msgpack.encode(one) for one in records]
        data = b"".join(_HEAD.pack(len(one), zlib.crc32(one)) + one for one in encoded)
        self._file.close()
        atomic_write(self._path, data, private=True)
        self._file, self._needed_bytes = self._path.open("ab", buffering=0), len(data)

    def load(self) -> JournalState | None:
        """Load the run as the last master of this state folder left it; None if it had not begun."""
        if not self._path.exists():
            return None
        begun: RunStart | None = None
        roster: Roster | None = None
        saved: Saved | None = None
        values: dict[str, bytes] = {}
        epochs: dict[int, Epoch] = {}
        next_process, assigned = 1, None
        for record in self._complete_records():
            if isinstance(record, RunStart):
                begun, roster, values, assigned = record, None, {}, None
            elif isinstance(record, StoredValue):
                values[record.key] = record.value
            elif isinstance(record, Saved):
                saved = record
            elif isinstance(record, ReportedEpoch):
                epochs[record.epoch.epoch] = record.epoch
            elif isinstance(record, Assigned):
                assigned = record.nodes
            else:
                roster, next_process = record, record.next
        if roster is None and begun is not None and not begun.secret:
            roster = roster_of({}, (), next_process, None)
        if begun is None or roster is None:
            return None
        return JournalState(
            begun=begun,
            values=values,
            roster=roster,
            saved=saved,
            epochs=tuple(epochs.values()),
            assigned=assigned,
        )

    def forget(self) -> None:
        """Remove the file: the run is over."""
        self.close()
        self._path.unlink(missing_ok=True)

    def set_aside(self) -> str:
        """Move the file to where no other run finds it; return a clause that names the place."""
        self.close()
        return self._home.set_aside([self._path] if self._path.exists() else [])

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file, self._is_failing, self._needed_bytes = None, False, 0

    def _write(self, data: bytes) -> None:
        """Append bytes. Raises OSError: not all could be written."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = self._path.open("ab", buffering=0)
            self._path.chmod(0o600)
        if self._file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _complete_records(self) -> list[Record]:
        """Return all records up to the first incomplete one; truncate the file there."""
        data, start, records = self._path.read_bytes(), 0, list[Record]()
        while (read := _record_at(data, start)) is not None:
            record, start = read
            records.append(record)
        if start < len(data):
            os.truncate(self._path, start)
            self._notify(
                f"warning: {len(data) - start} bytes at the end of {self._path} are incomplete and were removed"
            )
        return records


def _record_at(data: bytes, start: int) -> tuple[Record, int] | None:
    """Return the record at `start`, and the start of the next one; None if it is incomplete."""
    if start + _HEAD.size > len(data):
        return None
    size, checksum = _HEAD.unpack_from(data, start)
    content = data[start + _HEAD.size : start + _HEAD.size + size]
    if len(content) != size or zlib.crc32(content) != checksum:
        return None
    return _decoder.decode(content), start + _HEAD.size + size
