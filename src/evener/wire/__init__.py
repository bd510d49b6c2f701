"""Framed messages between a master and its nodes, over TCP or Unix sockets, encrypted and authenticated; no pickle.

A node calls `connect` and then sends and receives, blocking. The master's `Hub` serves all of them in one thread and
tells what happened as events. Both send tensors from where they lie and receive them into where they belong.
"""

from evener.wire.address import Address
from evener.wire.connection import Connection
from evener.wire.dialling import connect
from evener.wire.events import Closed, Event, Message, Opened, Refused, Sent
from evener.wire.frame import Buffer, Frame, allocate
from evener.wire.hub import Hub
from evener.wire.identity import Identity, make_identity
from evener.wire.limits import Limits
from evener.wire.refusals import (
    BadFrame,
    BadToken,
    CannotJoin,
    CannotListen,
    CannotResolve,
    ConnectionLost,
    MasterFull,
    NoAnswer,
    NotAMaster,
    NothingListens,
    OtherMaster,
    TransportDiffers,
    VersionDiffers,
    WrongSecret,
)
from evener.wire.token import Token
from evener.wire.traffic import Tally, Traffic

__all__ = [
    "Address",
    "BadFrame",
    "BadToken",
    "Buffer",
    "CannotJoin",
    "CannotListen",
    "CannotResolve",
    "Closed",
    "Connection",
    "ConnectionLost",
    "Event",
    "Frame",
    "Hub",
    "Identity",
    "Limits",
    "MasterFull",
    "Message",
    "NoAnswer",
    "NotAMaster",
    "NothingListens",
    "Opened",
    "OtherMaster",
    "Refused",
    "Sent",
    "Tally",
    "Token",
    "Traffic",
    "TransportDiffers",
    "VersionDiffers",
    "WrongSecret",
    "allocate",
    "connect",
    "make_identity",
]
