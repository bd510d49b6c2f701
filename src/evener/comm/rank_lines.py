"""Sees that the line between two ranks is cut, though both reach everybody else.

Heartbeats do not show that, as they pass through the store; a collective waits, as for a slow rank. So every two ranks
keep a connection on which nothing is ever sent. The kernels at its ends ask each other for a sign of life (TCP's
keepalive), and they answer while a process computes, or stands still: only a line that is cut ends the connection. On a
connection with data under way, the kernel would send these again for a quarter of an hour.
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
"""Within the patience, if it is long enough: between two of them are whole seconds."""
_FEWEST_PROBES = 3
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_ENDED = select.POLLIN | getattr(select, "POLLRDHUP", 0)
"""What shows that the other end was closed: nothing is ever sent."""


class RankLines:
    """The lines from one rank to all others.

    Args:
        mesh: nobody else uses it.
        patience: seconds for which a line may be cut; somewhat more are borne, as heartbeats may know more.
    """

    def __init__(self, mesh: Mesh, patience: float) -> None:
        self._mesh, self._cut = mesh, set[int]()
        self._lock, self._is_closed = threading.Lock(), False
        self._open = {peer.sock.fileno(): (rank, peer.sock) for rank, peer in mesh.peers.items()}
        self._poll = select.poll()
        for number, (_, sock) in self._open.items():
            _ask_for_signs(sock, patience)
            self._poll.register(number, _ENDED)

    def cut(self) -> NodeLost | None:
        """What this rank ends with if one of its lines is cut. The later rank of the two gives way, by `LineCut`."""
        with self._lock:
            for number, _ in () if self._is_closed else self._poll.poll(0):
                rank, sock = self._open[number]
                self._poll.unregister(number)
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _UNREACHABLE:
                    self._cut.add(rank)
        if not self._cut:
            return None
        own, other, nodes = self._mesh.rank, min(self._cut), self._mesh.nodes
        sentence = f"node {nodes[own]} (rank {own}) does not reach node {nodes[other]} (rank {other}) any more"
        kind = LineCut if other < own else NodeLost
        return kind(f"{sentence}, though others hear both: the line between them is cut", (nodes[max(own, other)],))

    def close(self) -> None:
        """Stop watching; another thread may be in `cut`."""
        with self._lock:
            self._is_closed = True
            self._mesh.close()


def is_unreachable(error: OSError) -> bool:
    """Whether a connection was not made because nothing comes back from the other machine."""
    return isinstance(error, TimeoutError) or error.errno in _UNREACHABLE


def _ask_for_signs(sock: socket.socket, patience: float) -> None:
    """Have the kernel end an idle connection with ETIMEDOUT when nothing has come back for the patience."""
    seconds = max(1, int(patience / _PROBES))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        count = max(_FEWEST_PROBES, math.ceil(patience / seconds))
        for option, value in (
            (socket.TCP_KEEPIDLE, seconds),
            (socket.TCP_KEEPINTVL, seconds),
            (socket.TCP_KEEPCNT, count),
        ):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
