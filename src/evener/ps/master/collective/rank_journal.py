"""What a master writes down of a run whose ranks work together, so that killed and started again it goes on with it.

    run/ranks.journal    a record after the other, each after its length and its CRC-32

What follows the last record that is whole is cut off: it was being written when the master died, or is damaged. On a
disk that is full nothing remains, for who goes on from an older state counts backwards.

The weights are with the ranks. What lies here is what they found each other by, and who takes part since when: numbers
of generations and of processes never go back. A value's first writing is kept; what is written again are beats.
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
from evener.records.schema import Amount, Part

_HEAD = struct.Struct("<II")
"""Bytes of a record, and their CRC-32."""
_FILE = "ranks.journal"
_LEAST_COMPACTED = 4 * 2**20


class Begun(Part, frozen=True, kw_only=True, tag=True):
    """A beginning of the run: what was known before of processes and values holds no more.

    Attributes:
        job: what is to be done.
        secret: of the processes; empty before there are any.
    """

    job: RankJob
    secret: bytes


class Kept(Part, frozen=True, kw_only=True, tag=True):
    """A value that a process left for the others."""

    key: str
    value: bytes


class Saved(Part, frozen=True, kw_only=True, tag=True):
    """A checkpoint that is here.

    Attributes:
        step: after which it was written.
        digest: of its blob.
    """

    step: Amount
    digest: str


class Roster(Part, frozen=True, kw_only=True, tag=True):
    """Who stands for which node.

    Attributes:
        names: of the nodes.
        numbers: of their processes.
        given_up: those of them that the run goes on without.
        next: number of the next process.
        generation: the newest; None before all have come.
    """

    names: tuple[str, ...]
    numbers: tuple[Amount, ...]
    given_up: tuple[Amount, ...]
    next: Amount
    generation: Generation | None


Record: TypeAlias = Begun | Kept | Saved | Roster
_decoder = msgspec.msgpack.Decoder(Record)


class Found(Part, frozen=True, kw_only=True):
    """All that was written down: the last beginning, the values since, how it stood, and the last checkpoint."""

    begun: Begun
    values: dict[str, bytes]
    roster: Roster
    saved: Saved | None = None


def roster_of(numbers: Mapping[str, int], given_up: Sequence[int], next: int, generation: Generation | None) -> Roster:
    """Who stands for which node: the numbers of processes, by node, and the rest of a `Roster`."""
    return Roster(
        names=tuple(numbers),
        numbers=tuple(numbers.values()),
        given_up=tuple(given_up),
        next=next,
        generation=generation,
    )


class RankJournal:
    """Of one run at a time; close it.

    Args:
        home: of the master.
        notify: tells the master's user.
    """

    def __init__(self, home: StateDir, notify: Callable[[str], None]) -> None:
        self._home, self._path, self._notify = home, home.run / _FILE, notify
        self._file: BinaryIO | None = None
        self._is_failing, self._needed_bytes = False, 0

    def add(self, record: Record) -> None:
        """Write a record down; a disk that is full is a warning, and the next beginning is tried again."""
        if self._is_failing and not isinstance(record, Begun):
            return
        data = msgspec.msgpack.encode(record)
        try:
            self._write(_HEAD.pack(len(data), zlib.crc32(data)) + data)
            self._is_failing = False
            self._compact_if_due()
        except OSError as error:
            self._notify(f"warning: the run cannot be written down ({error.strerror}): it ends with this master")
            self._is_failing = True
            if self._file is not None:
                self._file.truncate(0)

    def _compact_if_due(self) -> None:
        """Keep no more than twice of what is needed, and some megabytes: rosters are written again and again."""
        assert self._file is not None
        if self._file.tell() < _LEAST_COMPACTED + 2 * self._needed_bytes or (found := self.load()) is None:
            return
        records: list[Record] = [found.begun, *(Kept(key=key, value=value) for key, value in found.values.items())]
        records += [found.roster, *([] if found.saved is None else [found.saved])]
        encoded = [msgspec.msgpack.encode(one) for one in records]
        data = b"".join(_HEAD.pack(len(one), zlib.crc32(one)) + one for one in encoded)
        self._file.close()
        atomic_write(self._path, data, private=True)
        self._file, self._needed_bytes = self._path.open("ab", buffering=0), len(data)

    def load(self) -> Found | None:
        """What the last master of this home wrote down of a run that was in progress; None if there was none."""
        if not self._path.exists():
            return None
        begun: Begun | None = None
        roster: Roster | None = None
        saved: Saved | None = None
        values: dict[str, bytes] = {}
        for record in self._whole():
            if isinstance(record, Begun):
                begun, roster, values = record, None, {}
            elif isinstance(record, Kept):
                values[record.key] = record.value
            elif isinstance(record, Saved):
                saved = record
            else:
                roster = record
        if roster is None and begun is not None and not begun.secret:
            roster = roster_of({}, (), 1, None)
        if begun is None or roster is None:
            return None
        return Found(begun=begun, values=values, roster=roster, saved=saved)

    def forget(self) -> None:
        """The run is over."""
        self.close()
        self._path.unlink(missing_ok=True)

    def set_aside(self) -> str:
        """Keep what is written down apart, so that no other run comes upon it; where it is, in words."""
        self.close()
        return self._home.set_aside([self._path] if self._path.exists() else [])

    def close(self) -> None:
        """Nothing more is written now."""
        if self._file is not None:
            self._file.close()
        self._file, self._is_failing, self._needed_bytes = None, False, 0

    def _write(self, data: bytes) -> None:
        """Raises OSError: not all of it."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = self._path.open("ab", buffering=0)
            self._path.chmod(0o600)
        if self._file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _whole(self) -> list[Record]:
        """The records until the first that is not whole, which is cut off with all that follows it."""
        data, start, found = self._path.read_bytes(), 0, list[Record]()
        while (read := _record_at(data, start)) is not None:
            record, start = read
            found.append(record)
        if start < len(data):
            os.truncate(self._path, start)
            self._notify(f"warning: {len(data) - start} bytes at the end of {self._path} are not whole, and cut off")
        return found


def _record_at(data: bytes, start: int) -> tuple[Record, int] | None:
    """The record that begins there, and where the next one does; None if it is not whole."""
    if start + _HEAD.size > len(data):
        return None
    size, checksum = _HEAD.unpack_from(data, start)
    content = data[start + _HEAD.size : start + _HEAD.size + size]
    if len(content) != size or zlib.crc32(content) != checksum:
        return None
    return _decoder.decode(content), start + _HEAD.size + size
