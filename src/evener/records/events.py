"""Events of a run as they are sent to viewers: from a rank to its launcher, from the master to a command; as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec

from evener.records.decoding import json_decoder
from evener.records.plan import Plan
from evener.records.profile import ClusterProfile
from evener.records.record import Epoch, Event, Step, TrainRecord, Validation
from evener.records.schema import Amount, Part, decode_printable

MAX_EVENTS_BYTES = 2**20
"""Limit of the events that a process sends at a time, without its record."""


class Phase(Part, frozen=True, kw_only=True):
    """The current phase of a run; it is shown, but not recorded.

    Attributes:
        what: activity, such as `measuring`.
        detail: details of the activity.
        num_samples: samples that will have been trained on at its end; 0 where that is unknown or meaningless.
        done: samples before it began.
        epochs: epochs of the run; 0 where that is unknown.
        options: options as in a `TrainRecord`; empty where they were sent before.
        task: name of the task; empty where it was sent before.
        file: name of the file that defines the task, without its folder; empty for built-in tasks too.
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
_decoder = json_decoder(list[tuple[str, msgspec.Raw]])
_single = json_decoder(tuple[tuple[str, msgspec.Raw]])


def encode_events(events: Sequence[RunEvent]) -> bytes:
    """Encode `events`, each with the name of its class."""
    return msgspec.json.encode([(type(event).__name__, event) for event in events])


def decode_events(data: bytes | memoryview) -> list[RunEvent]:
    """Decode the events in a buffer, their texts printable. Raises msgspec.DecodeError."""
    return [decode_printable(raw, _kind_of(name)) for name, raw in _decoder.decode(data)]


def sized_events(data: bytes | memoryview, most: int) -> Iterator[tuple[int, RunEvent]]:
    """Yield each event with its size, without events of more than `most` bytes; a single record may be larger.

    Raises:
        msgspec.DecodeError: there are no events, or a large record is not alone.
    """
    is_large = len(data) > MAX_EVENTS_BYTES
    rows = _single.decode(data) if is_large else _decoder.decode(data)
    if is_large and rows[0][0] != TrainRecord.__name__:
        raise msgspec.ValidationError(f"events of {len(data)} bytes are more than {MAX_EVENTS_BYTES}")
    for name, raw in rows:
        size = memoryview(raw).nbytes
        if size <= most or name == TrainRecord.__name__:
            yield size, decode_printable(raw, _kind_of(name))


def _kind_of(name: str) -> type[RunEvent]:
    if name not in _KINDS:
        raise msgspec.ValidationError(f"there is no event of kind {name[:64]!r}")
    return _KINDS[name]
