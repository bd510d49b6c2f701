"""Detection of a broken connection between two ranks that both still reach all others.

Heartbeats cannot detect this, because they pass through the store; a collective waits, as for a slow rank. So every two
ranks keep an idle connection with TCP keepalive. The kernels answer it even while a process computes or is stopped, so
only a broken link ends the connection. With data under way, the kernel would retransmit for a quarter of an hour.
"""

from __future__ import annotations

import errno
import math
import select
import socket
import sys
import threading

from evener.comm.mesh import Mesh
from evener.records.errors import LineCut, NodeLost

_PROBES = 8
"""Number within the patience, if it is long enough for intervals of whole seconds."""
_MIN_PROBES = 3
_MOMENT_MS = 100
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_ENDED = select.POLLIN | getattr(select, "POLLRDHUP", 0)
"""Events that show a closed connection, as no data are sent."""


class PeerLines:
    """The idle connections from one rank to all others.

    Args:
        mesh: of idle connections.
        patience: seconds for which a connection may be broken; heartbeats, which may know more, have slightly less.
    """

    def __init__(self, mesh: Mesh, patience: float) -> None:
        self._mesh, self._cut, self._ended = mesh, set[int](), list[int]()
        self._lock, self._is_closed = threading.Lock(), False
        self._open = {peer.sock.fileno(): (rank, peer.sock) for rank, peer in mesh.peers.items()}
        self._poll = select.poll()
        for number, (_, sock) in self._open.items():
            _set_keepalive(sock, patience)
            self._poll.register(number, _ENDED)

    def cut(self) -> NodeLost | None:
        """Return the error of a broken connection, or None. The later rank of the two gives way, by `LineCut`."""
        self._look(0)
        if not self._cut:
            return None
        rank, other, nodes = self._mesh.rank, min(self._cut), self._mesh.nodes
        sentence = f"node {nodes[rank]} (rank {rank}) does not reach node {nodes[other]} (rank {other}) any more"
        kind = LineCut if other < rank else NodeLost
        return kind(
            f"{sentence}, though others reach both: check the network and the firewalls between them",
            (nodes[max(rank, other)],),
        )

    def first_ended(self) -> int | None:
        """Return the rank whose process was the first to close its connection, or None; waits a moment for it."""
        if not self._ended:
            self._look(_MOMENT_MS)
        return self._ended[0] if self._ended else None

    def _look(self, wait_ms: int) -> None:
        """Note which connections are broken, or closed by the other process."""
        with self._lock:
            for number, _ in () if self._is_closed else self._poll.poll(wait_ms):
                rank, sock = self._open[number]
                self._poll.unregister(number)
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _UNREACHABLE:
                    self._cut.add(rank)
                else:
                    self._ended.append(rank)

    def close(self) -> None:
        """Stop watching; another thread may be in `cut`."""
        with self._lock:
            self._is_closed = True
            self._mesh.close()


def is_unreachable(error: OSError) -> bool:
    """Whether a connection failed because the other machine did not answer."""
    return isinstance(error, TimeoutError) or error.errno in _UNREACHABLE


def _set_keepalive(sock: socket.socket, patience: float) -> None:
    """Let the kernel end an idle connection with ETIMEDOUT after `patience` seconds without an answer."""
    seconds = max(1, int(patience / _PROBES))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        count = max(_MIN_PROBES, math.ceil(patience / seconds))
        for option, value in (
            (socket.TCP_KEEPIDLE, seconds),
            (socket.TCP_KEEPINTVL, seconds),
            (socket.TCP_KEEPCNT, count),
        ):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
