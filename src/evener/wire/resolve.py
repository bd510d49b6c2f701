"""Resolution of a host name, with a timeout, which the name service itself does not have."""

from __future__ import annotations

import queue
import socket
import threading
import time
from typing import Any

from evener.wire.errors import CannotResolve
from evener.wire.identity import LOCALHOST, Address


def resolve(address: Address, deadline: float) -> list[tuple[socket.AddressFamily, Any]]:
    """Return family and socket address of every address of a host name.

    The name service is queried in a separate thread: it may take minutes and cannot be interrupted.

    Args:
        address: A name or an IP address, with a port.
        deadline: Deadline on the clock of `time.monotonic`.

    Raises:
        CannotResolve: The name is unknown, or the name service does not answer.
    """
    host = None if address.host in ("", LOCALHOST) else address.host
    answer: queue.SimpleQueue[list[Any] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answer.put(socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            answer.put(error)

    threading.Thread(target=ask, daemon=True, name="resolve").start()
    try:
        result = answer.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        raise CannotResolve(address.description, "the name service does not answer") from None
    if isinstance(result, Exception):
        raise CannotResolve(address.description, getattr(result, "strerror", None) or str(result)) from result
    return [(family, where) for family, _, _, _, where in result]
