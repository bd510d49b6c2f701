"""From a machine's name to its addresses, within a time that the name service itself does not promise."""

from __future__ import annotations

import queue
import socket
import threading
import time
from typing import Any

from evener.wire.errors import CannotResolve
from evener.wire.identity import Address


def resolve(address: Address, deadline: float) -> list[tuple[socket.AddressFamily, Any]]:
    """Family and socket address of every address that the machine's name stands for.

    The name service is asked in a thread of its own: it may take minutes and cannot be interrupted.

    Args:
        address: a name or an IP address, with a port.
        deadline: as `time.monotonic` counts, until which an answer is waited for.

    Raises:
        CannotResolve: nobody knows the name, or the name service does not answer.
    """
    answer: queue.SimpleQueue[list[Any] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answer.put(socket.getaddrinfo(address.host or None, address.port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            answer.put(error)

    threading.Thread(target=ask, daemon=True, name="resolve").start()
    try:
        found = answer.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        raise CannotResolve(address.words, "the name service does not answer") from None
    if isinstance(found, Exception):
        raise CannotResolve(address.words, getattr(found, "strerror", None) or str(found)) from found
    return [(family, where) for family, _, _, _, where in found]
