"""What a rank's process tells the process that started it: typed structs on a pipe, no pickle."""

from __future__ import annotations

from typing import Literal

import msgspec

from evener.plan import Plan
from evener.profile import ClusterProfile
from evener.record import Event, Step, TrainRecord, Validation

Word = Plan | Step | Validation | Event | TrainRecord | ClusterProfile
_WORDS: dict[str, type[Word]] = {
    kind.__name__: kind for kind in (Plan, Step, Validation, Event, TrainRecord, ClusterProfile)
}


class Said(msgspec.Struct, frozen=True, tag=True):
    """A noun, or a part of one, for whoever started the run.

    Attributes:
        kind: name of its class.
        data: as JSON.
    """

    kind: str
    data: bytes


class Failed(msgspec.Struct, frozen=True, tag=True):
    """This rank ends with an error.

    Attributes:
        cause: `own` if it arose here; `others` if the connection to another rank broke, or that one fell silent.
        exit_code: of the error.
        sentence: for the user.
        traceback: for whoever mends it; empty for errors that the sentence explains.
    """

    cause: Literal["own", "others"]
    exit_code: int
    sentence: str
    traceback: str = ""


class Finished(msgspec.Struct, frozen=True, tag=True):
    """This rank has done its work and ends."""


Message = Said | Failed | Finished

_decoder = msgspec.msgpack.Decoder(Message)


def say(word: msgspec.Struct) -> bytes:
    """The frame that says `word`."""
    return encode(Said(type(word).__name__, msgspec.json.encode(word)))


def encode(message: Message) -> bytes:
    """`message` as one frame."""
    return msgspec.msgpack.encode(message)


def decode(frame: bytes) -> Message:
    """The message in `frame`."""
    message: Message = _decoder.decode(frame)
    return message


def heard(said: Said) -> Word:
    """What was said."""
    return msgspec.json.decode(said.data, type=_WORDS[said.kind])
