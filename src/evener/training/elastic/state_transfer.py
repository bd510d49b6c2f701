"""States of a training between ranks, over the mesh (`held_state` says what they are).

send_state, take_state    a whole state, from one rank to another
send_large, take_large    any large data, from one rank to another
share_states              parts, from the ranks that have some to all ranks
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from evener.comm.group import Group
from evener.comm.mesh import Mesh
from evener.records.decoding import decode_json
from evener.records.schema import Amount
from evener.training.elastic.held_state import HeldState

_PIECE = 2**20
"""Bytes of a message, at most: while one travels, the next is signed and the previous one verified."""


def send_state(held: HeldState, mesh: Mesh, rank: int) -> None:
    """Send `held` to a rank."""
    send_large(held.encode(), mesh, rank)


def take_state(mesh: Mesh, source: int) -> HeldState:
    """Receive the state that rank `source` sends."""
    return HeldState.decode(take_large(mesh, source))


def send_large(data: bytes, mesh: Mesh, rank: int) -> None:
    """Send `data` to a rank, in pieces."""
    mesh.send_to(rank, msgspec.json.encode(len(data)))
    for start in range(0, len(data), _PIECE):
        mesh.send_to(rank, data[start : start + _PIECE])


def take_large(mesh: Mesh, source: int) -> bytearray:
    """Receive data that rank `source` sends in pieces."""
    size = decode_json(mesh.receive_from(source), Amount)
    data = bytearray()
    while len(data) < size:
        data += mesh.receive_from(source)
    return data


def share_states(encoded: Sequence[bytes], group: Group) -> list[HeldState]:
    """Return the states that all ranks give, in the order of ranks; all ranks call this with theirs, `encoded`."""
    rows = [
        decode_json(row, list[Amount])
        for row in group.all_gather_bytes(msgspec.json.encode([len(data) for data in encoded]))
    ]
    states = []
    for rank, sizes in enumerate(rows):
        for number, size in enumerate(sizes):
            data = bytearray()
            for start in range(0, size, _PIECE):
                piece = encoded[number][start : start + _PIECE] if rank == group.rank else b""
                data += group.broadcast_from(rank, piece)
            states.append(HeldState.decode(data))
    return states
