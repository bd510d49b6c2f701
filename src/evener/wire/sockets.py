"""Sockets as Evener wants them: no delayed small segments, dead peers noticed by the system, doors opened safely."""

from __future__ import annotations

import os
import socket
import stat

from evener.wire.address import Address
from evener.wire.refusals import CannotListen

_BACKLOG = 256
_UNIX_BUFFER_BYTES = 1 << 20


def tune(sock: socket.socket, patience: float) -> None:
    """Set the options of a connected socket.

    TCP's buffers stay with the system, which fits them to the link; a fixed size would switch that off. Unix sockets
    have no such thing and are given what the system allows.
    """
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _UNIX_BUFFER_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = max(1, round(patience / 3))
    for option, value in (("TCP_KEEPIDLE", seconds), ("TCP_KEEPINTVL", seconds), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def open_door(address: Address) -> tuple[socket.socket, Address]:
    """A non-blocking listening socket at `address`, and the address with the port that it really has.

    Raises:
        CannotListen: the address is taken, not of this machine, or not allowed.
    """
    try:
        door = _unix_door(address.path) if address.path else _tcp_door(address)
    except OSError as error:
        raise CannotListen(f"cannot listen at {address}: {error.strerror or error}") from error
    door.setblocking(False)
    return door, address if address.path else Address(address.host, door.getsockname()[1])


def close_door(door: socket.socket) -> None:
    """Close a listening socket, and remove its path if it is a Unix socket."""
    path = door.getsockname() if door.family == socket.AF_UNIX else ""
    door.close()
    if path and os.path.exists(path):
        os.unlink(path)


def _tcp_door(address: Address) -> socket.socket:
    if address.host in ("", "::"):
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", address.port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    family, _, _, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(where, family=family, backlog=_BACKLOG)


def _unix_door(path: str) -> socket.socket:
    _remove_stale(path)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        door.bind(path)
        os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)  # before listening: until then nobody can connect
        door.listen(_BACKLOG)
    except OSError:
        door.close()
        raise
    return door


def _remove_stale(path: str) -> None:
    """Remove the socket that a killed master has left at `path`; a living one's stays, and so does any other file."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
