"""States of a training between ranks, over the mesh (`held_state` says what they are).

send_state, take_state    from one that holds the whole to one that does not
send_large, take_large    likewise, of any state
share_states              parts from all who have some to all
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from evener.comm.group import Group
from evener.comm.mesh import Mesh
from evener.records.schema import Amount
from evener.training.elastic.held_state import HeldState

_PIECE = 2**20
"""Bytes of a message, at most: while one travels, the next is signed, and the one before it proved."""


def send_state(held: HeldState, mesh: Mesh, rank: int) -> None:
    """Send `held` to a rank."""
    send_large(held.encode(), mesh, rank)


def take_state(mesh: Mesh, source: int) -> HeldState:
    """What rank `source` sends."""
    return HeldState.decode(take_large(mesh, source))


def send_large(data: bytes, mesh: Mesh, rank: int) -> None:
    """Send `data` to a rank, in pieces."""
    mesh.send_to(rank, msgspec.json.encode(len(data)))
    for start in range(0, len(data), _PIECE):
        mesh.send_to(rank, data[start : start + _PIECE])


def take_large(mesh: Mesh, source: int) -> bytearray:
    """What rank `source` sends in pieces."""
    size = msgspec.json.decode(mesh.receive_from(source), type=Amount)
    data = bytearray()
    while len(data) < size:
        data += mesh.receive_from(source)
    return data


def share_states(own: Sequence[bytes], group: Group) -> list[HeldState]:
    """The encoded states that ranks give, `own` among them: of the first rank first; all ranks call this."""
    rows = [
        msgspec.json.decode(row, type=list[Amount])
        for row in group.all_gather_bytes(msgspec.json.encode([len(data) for data in own]))
    ]
    found = []
    for rank, sizes in enumerate(rows):
        for number, size in enumerate(sizes):
            data = bytearray()
            for start in range(0, size, _PIECE):
                mine = own[number][start : start + _PIECE] if rank == group.rank else b""
                data += group.broadcast_from(rank, mine)
            found.append(HeldState.decode(data))
    return found
