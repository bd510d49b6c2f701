"""A line between two ranks that is cut is told from a rank that has ended, and the later of the two gives way."""

from __future__ import annotations

import errno
import socket

import pytest

from evener.comm.channel import Channel
from evener.comm.mesh import Mesh
from evener.comm.peer_lines import PeerLines
from evener.records.errors import LineCut, NodeLost


class Ended(socket.socket):
    """A connection that the kernel ends by an error."""

    error = 0

    def getsockopt(self, level: int, name: int, *_: int) -> int:  # type: ignore[override]
        return self.error if (level, name) == (socket.SOL_SOCKET, socket.SO_ERROR) else super().getsockopt(level, name)


@pytest.fixture
def ends() -> tuple[Ended, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = Ended()
        here.connect(server.getsockname())
        return here, server.accept()[0]


def lines(rank: int, sock: socket.socket) -> PeerLines:
    """Those of `rank` of two."""
    channel = Channel(sock, b"key", is_caller=True)
    return PeerLines(Mesh(rank=rank, nodes=["a", "b"], peers={1 - rank: channel}), 6.0)


def test_ended_rank_is_not_a_cut_link(ends: tuple[Ended, socket.socket]) -> None:
    here, there = ends
    watched = lines(1, here)
    assert watched.cut() is None
    assert here.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert watched.first_ended() is None
    there.close()
    assert watched.cut() is None
    assert watched.cut() is None
    assert watched.first_ended() == 0
    watched.close()


@pytest.mark.parametrize(("rank", "kind"), [(0, NodeLost), (1, LineCut)])
def test_later_rank_of_a_cut_link_leaves(ends: tuple[Ended, socket.socket], rank: int, kind: type[NodeLost]) -> None:
    here, there = ends
    watched = lines(rank, here)
    here.error = errno.ETIMEDOUT
    there.close()
    for _ in range(2):
        error = watched.cut()
        assert type(error) is kind
        assert error.nodes == ("b",)
    watched.close()


def test_stopped_link_monitor_reports_nothing(ends: tuple[Ended, socket.socket]) -> None:
    watched = lines(1, ends[0])
    watched.close()
    assert watched.cut() is None
    ends[1].close()
