"""Frames reach a node in order, whether it reads them itself or has them read while it computes."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from evener.ps.node.reconnecting_client import Inbox, RunEnded, ThreadedInbox
from evener.ps.protocol.messages import Dismiss, Header, Heartbeat, Prepare, Quarantine, Release
from evener.wire.errors import ConnectionLost
from evener.wire.frame import Frame


class Client:
    """A connection on which a test says what comes."""

    def __init__(self) -> None:
        self.arriving: queue.Queue[Header | Exception] = queue.Queue()
        self.sent: list[Header] = []

    def has_frame(self) -> bool:
        return not self.arriving.empty()

    def receive(self, place: Any = None) -> Frame[Header]:
        found = self.arriving.get(timeout=10)
        if isinstance(found, Exception):
            raise found
        return Frame(found, ())

    def send(self, header: Header, _: Sequence[Any] = ()) -> None:
        self.sent.append(header)


@pytest.fixture
def client() -> Client:
    return Client()


def arrive(client: Client, *headers: Header | Exception) -> None:
    for header in headers:
        client.arriving.put(header)


PREPARE, RELEASE = Prepare(run="next"), Release(run="last")


@pytest.mark.parametrize("kind", [Inbox, ThreadedInbox])
def test_cancelled_work_ends_between_two_steps(client: Client, kind: Callable[[Any], Any]) -> None:
    inbox = kind(client)
    inbox.check_run()
    arrive(client, Quarantine(seconds=1.0, reason="late"), RELEASE)
    while isinstance(inbox, ThreadedInbox) and len(inbox._arrived) < 2:
        time.sleep(0.001)
    with pytest.raises(RunEnded):
        inbox.check_run()
    assert isinstance(inbox.receive().header, Quarantine)
    assert inbox.receive().header == RELEASE
    arrive(client, ConnectionLost("over"))
    inbox.close()


def test_heartbeats_during_work_are_dropped(client: Client) -> None:
    inbox: Any = Inbox(client)  # type: ignore[arg-type]
    arrive(client, Heartbeat(), PREPARE)
    inbox.check_run()
    assert [frame.header for frame in inbox.waiting] == [PREPARE]


def test_frames_received_before_the_threads_started_come_first(client: Client) -> None:
    plain: Any = Inbox(client)  # type: ignore[arg-type]
    arrive(client, PREPARE, RELEASE)
    with pytest.raises(RunEnded):
        plain.check_run()
    arrive(client, Dismiss(reason="later", is_error=False), ConnectionLost("over"))
    inbox = ThreadedInbox(client, plain.waiting)  # type: ignore[arg-type]
    assert [type(inbox.receive().header) for _ in range(3)] == [Prepare, Release, Dismiss]
    with pytest.raises(ConnectionLost):
        inbox.receive()
    inbox.close()


def test_threads_send_in_order(client: Client) -> None:
    inbox = ThreadedInbox(client)  # type: ignore[arg-type]
    headers = [Prepare(run=str(number)) for number in range(5)]
    for header in headers:
        inbox.send(header)
    arrive(client, ConnectionLost("over"))
    inbox.close()
    assert client.sent == headers
