"""Calls on sockets that differ between systems: waiting with a limit, blocking, and the number of bytes under way.

Windows has neither `poll` nor `sendmsg`, and no flag by which one call does not block on a socket that does. Sockets
therefore never block there, and a receiver waits for bytes before it reads (`RECEIVES_BLOCK` is False).
"""

from __future__ import annotations

import errno
import select
import socket
import struct
import sys
import time
from collections.abc import Callable

try:
    import fcntl
    import termios
except ImportError:  # on Windows
    fcntl = termios = None  # type: ignore[assignment]

RECEIVES_BLOCK = hasattr(socket, "MSG_DONTWAIT")
"""Whether receiving on a socket after `block_for` waits for bytes; otherwise it raises BlockingIOError."""
WITHOUT_BLOCKING = getattr(socket, "MSG_DONTWAIT", 0)
"""Flag of calls that do not block, where sockets may block."""
SENDS_MANY = hasattr(socket, "CMSG_LEN")
"""Whether sockets have `sendmsg`."""
MAX_VIEWS = 1024
"""Largest number of views in one `sendmsg` on POSIX systems."""
_TIMEVAL = struct.Struct("ll")
_COUNT = struct.Struct("i")
_SO_NWRITE = 0x1024
"""Option of macOS: the bytes that a socket has not sent, or that its peer has not confirmed."""


def block_for(sock: socket.socket, seconds: float) -> None:
    """Let receiving on `sock` wait for at most `seconds`. The system keeps the time, which saves a call per wait.

    Where calls cannot be exempt from blocking, `sock` does not block, and the caller waits before it receives.
    """
    sock.setblocking(RECEIVES_BLOCK)
    if RECEIVES_BLOCK:
        whole = int(seconds)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(whole, int(1e6 * (seconds - whole))))


def waiter(sock: socket.socket, *, to_send: bool = False) -> Callable[[float], bool]:
    """Return a function that waits up to a number of seconds; it returns whether `sock` is readable, or broken.

    Args:
        sock: the socket; after it was closed, the function raises OSError or returns True.
        to_send: wait until it is writable instead.
    """
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sock, select.POLLOUT if to_send else select.POLLIN)
        return lambda seconds: bool(poll.poll(1000 * max(0.0, seconds)))

    def wait(seconds: float) -> bool:
        if sock.fileno() < 0:
            raise OSError(errno.EBADF, "the socket was closed")
        awaited = [sock]
        ready = select.select([] if to_send else awaited, awaited if to_send else [], awaited, max(0.0, seconds))
        return any(ready)

    return wait


UNIX: int | None = getattr(socket, "AF_UNIX", None)
"""Family of sockets with a path; None where the system has none."""
READABLE, WRITABLE = getattr(select, "POLLIN", 1), getattr(select, "POLLOUT", 4)
"""Events of sockets, as the system's `poll` counts them."""


class SelectPoll:
    """Has the methods of `select.epoll` that a `Poller` calls, by `select.select`. Windows allows 512 sockets."""

    def __init__(self) -> None:
        self._wanted: dict[int, int] = {}

    def register(self, sock: socket.socket, events: int) -> None:
        """Watch a socket for these events, and for errors."""
        self._wanted[sock.fileno()] = events

    modify = register

    def unregister(self, sock: socket.socket) -> None:
        """Stop watching a socket."""
        del self._wanted[sock.fileno()]

    def poll(self, seconds: float) -> list[tuple[int, int]]:
        """Wait up to `seconds` for the first event; return pairs of (descriptor, events)."""
        to_send = [number for number, events in self._wanted.items() if events & WRITABLE]
        watched = list(self._wanted)
        if not watched:  # which Windows refuses
            time.sleep(seconds)
            return []
        readable, writable, broken = select.select(watched, to_send, watched, seconds)
        ready = dict.fromkeys((*readable, *broken), READABLE)
        for number in writable:
            ready[number] = ready.get(number, 0) | WRITABLE
        return list(ready.items())

    def close(self) -> None:
        """Forget all sockets."""
        self._wanted.clear()


def unacknowledged_bytes(sock: socket.socket) -> int:
    """Return the bytes that the system has taken and the peer has not confirmed; 0 if the system does not know.

    A socket takes a large piece at once, and then none while a slow link sends a part of it. A falling number shows
    that the link works.
    """
    try:
        if sys.platform == "darwin":
            return sock.getsockopt(socket.SOL_SOCKET, _SO_NWRITE)
        if fcntl is None:
            return 0
        return int(_COUNT.unpack(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(_COUNT.size)))[0])
    except OSError:
        return 0
