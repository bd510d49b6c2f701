"""Events of a run as they travel to whoever shows it: a rank's to its launcher, the master's to a command; as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec

from evener.records.plan import Plan
from evener.records.profile import ClusterProfile
from evener.records.record import Epoch, Event, Step, TrainRecord, Validation
from evener.records.schema import Amount, Part, decode_printable

MOST_EVENTS_BYTES = 2**20
"""That a process shows at a time, but for its record."""


class Phase(Part, frozen=True, kw_only=True):
    """What a run is about from now on; shown while it lasts, and in no record.

    Attributes:
        what: it does, such as `measuring`.
        detail: of that, in words.
        num_samples: that will have been trained on at the end of it; 0 where that is not known, or means nothing.
        done: of these, before it began.
        epochs: of the run; 0 likewise.
        options: as of a `TrainRecord`; empty where they were told before.
        task: name of the task; empty likewise.
        file: name of the file that defines the task, without its folder; empty likewise, and for built-in tasks.
    """

    what: str
    detail: str = ""
    num_samples: Amount = 0
    done: Amount = 0
    epochs: Amount = 0
    options: dict[str, str] = {}
    task: str = ""
    file: str = ""


RunEvent: TypeAlias = Plan | Step | Validation | Epoch | Event | Phase | TrainRecord | ClusterProfile
_KINDS: dict[str, type[RunEvent]] = {
    kind.__name__: kind for kind in (Plan, Step, Validation, Epoch, Event, Phase, TrainRecord, ClusterProfile)
}
_decoder = msgspec.json.Decoder(list[tuple[str, msgspec.Raw]])
_single = msgspec.json.Decoder(tuple[tuple[str, msgspec.Raw]])


def encode_events(events: Sequence[RunEvent]) -> bytes:
    """A buffer of `events`, each with the name of its class."""
    return msgspec.json.encode([(type(event).__name__, event) for event in events])


def decode_events(data: bytes | memoryview) -> list[RunEvent]:
    """The events in a buffer, their texts printable. Raises msgspec.DecodeError."""
    return [decode_printable(raw, _kind_of(name)) for name, raw in _decoder.decode(data)]


def sized_events(data: bytes | memoryview, most: int) -> Iterator[tuple[int, RunEvent]]:
    """The same with the bytes of each, but for events of more than `most` bytes; a record may be larger, alone.

    Raises:
        msgspec.DecodeError: there are none, or there is something else beside a large record.
    """
    is_large = len(data) > MOST_EVENTS_BYTES
    rows = _single.decode(data) if is_large else _decoder.decode(data)
    if is_large and rows[0][0] != TrainRecord.__name__:
        raise msgspec.ValidationError(f"events of {len(data)} bytes are more than {MOST_EVENTS_BYTES}")
    for name, raw in rows:
        size = memoryview(raw).nbytes
        if size <= most or name == TrainRecord.__name__:
            yield size, decode_printable(raw, _kind_of(name))


def _kind_of(name: str) -> type[RunEvent]:
    if name not in _KINDS:
        raise msgspec.ValidationError(f"there is no event of kind {name[:64]!r}")
    return _KINDS[name]
