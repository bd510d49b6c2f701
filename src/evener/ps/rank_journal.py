"""What a master writes down of a run whose ranks work together, so that killed and started again it goes on with it.

    run/ranks.journal    a record after the other, each after its length; what was being written when it died is cut off

The weights are with the ranks. What lies here is what they found each other by, and who takes part since when: numbers
of generations and of processes never go back. A value's first writing is kept; what is written again are beats.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TypeAlias

import msgspec

from evener.elastic.generation import Generation
from evener.ps.rank_messages import RankJob
from evener.schema import NOT_DECODED, Amount, Part

_LENGTH = struct.Struct("<I")
_FILE = "ranks.journal"


class Begun(Part, frozen=True, kw_only=True, tag=True):
    """A beginning of the run: what was known before of processes and values holds no more."""

    job: RankJob
    secret: bytes


class Kept(Part, frozen=True, kw_only=True, tag=True):
    """A value that a process left for the others."""

    key: str
    value: bytes


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


Record: TypeAlias = Begun | Kept | Roster
_decoder = msgspec.msgpack.Decoder(Record)


class Found(Part, frozen=True, kw_only=True):
    """All that was written down: the last beginning, the values since, and how it stood."""

    begun: Begun
    values: dict[str, bytes]
    roster: Roster


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
        folder: of the run in progress.
        notify: tells the master's user.
    """

    def __init__(self, folder: Path, notify: Callable[[str], None]) -> None:
        self._path, self._notify = folder / _FILE, notify
        self._file: BinaryIO | None = None
        self._is_failing = False

    def add(self, record: Record) -> None:
        """Write a record down; a disk that is full is a warning."""
        data = msgspec.msgpack.encode(record)
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._file = self._path.open("ab", buffering=0)
                self._path.chmod(0o600)
            self._file.write(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            if not self._is_failing:
                self._notify(f"warning: the run cannot be written down ({error.strerror}): it ends with this master")
            self._is_failing = True

    def load(self) -> Found | None:
        """What the last master of this home wrote down of a run that was in progress; None if there was none."""
        try:
            data = self._path.read_bytes()
        except OSError:
            return None
        begun: Begun | None = None
        roster: Roster | None = None
        values: dict[str, bytes] = {}
        for record in _records(data):
            if isinstance(record, Begun):
                begun, roster, values = record, None, {}
            elif isinstance(record, Kept):
                values[record.key] = record.value
            else:
                roster = record
        return None if begun is None or roster is None else Found(begun=begun, values=values, roster=roster)

    def forget(self) -> None:
        """The run is over."""
        self.close()
        self._path.unlink(missing_ok=True)
        self._is_failing = False

    def close(self) -> None:
        """Nothing more is written now."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _records(data: bytes) -> list[Record]:
    """Those that are whole."""
    found: list[Record] = []
    start = 0
    while start + _LENGTH.size <= len(data):
        (size,) = _LENGTH.unpack_from(data, start)
        start += _LENGTH.size
        try:
            found.append(_decoder.decode(data[start : start + size]))
        except NOT_DECODED:
            break
        start += size
    return found
