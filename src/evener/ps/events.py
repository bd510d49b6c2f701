"""News of a run as it travels from the master to the command that shows it: parts of the record, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from evener.plan import Plan
from evener.record import Event, Step, Validation

RunEvent: TypeAlias = Plan | Step | Validation | Event
_KINDS: dict[str, type[RunEvent]] = {kind.__name__: kind for kind in (Plan, Step, Validation, Event)}
_decoder = msgspec.json.Decoder(list[tuple[str, msgspec.Raw]])


def encode_events(words: Sequence[RunEvent]) -> bytes:
    """A buffer that says `words`, each with the name of its class."""
    return msgspec.json.encode([(type(word).__name__, word) for word in words])


def decode_events(data: bytes | memoryview) -> list[RunEvent]:
    """What was said. Raises msgspec.DecodeError."""
    return [msgspec.json.decode(raw, type=_KINDS[kind]) for kind, raw in _decoder.decode(data)]
