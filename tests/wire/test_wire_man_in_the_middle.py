"""Bytes cut, corrupted, repeated, dropped, swapped, delayed or held: noticed in time, and nobody else's business."""

from __future__ import annotations

import time
from contextlib import closing
from random import Random

import pytest

from evener.records.errors import NodeLost
from evener.wire.connect import open_connection
from evener.wire.connection import Connection
from evener.wire.errors import BadFrame
from evener.wire.identity import Address
from evener.wire.limits import Limits
from evener.wire.server_events import FrameReceived, PeerDisconnected
from support.wire_peers import Kinds, Push, World, world
from support.wire_proxy import Direction, Mischief, Way, man_in_the_middle

pytestmark = pytest.mark.posix
PAYLOAD = bytes(range(256)) * 20
NUM_ROUNDS = 4
HASTY, PATIENT = Limits(patience=0.25), Limits(patience=10)
GREETING_BYTES = 80
"""Of each side without TLS."""
WAYS: tuple[Way, ...] = ("cut", "corrupt", "repeat", "drop", "swap", "delay", "stop")
DIRECTIONS: tuple[Direction, ...] = ("to master", "to node")


class Spoiled(Exception):
    """A payload arrived that was never sent."""


def converse(address: Address, w: World, believing: bool) -> str:
    """Rounds of a message and its answer through `address`; `done`, or the error in which they end."""
    try:
        node: Connection[Kinds] = open_connection(
            address, w.identity.token, Kinds, w.limits, seconds=min(5.0, 4 * w.limits.patience)
        )
        with closing(node):
            for number in range(NUM_ROUNDS):
                node.send(Push(number), [PAYLOAD])
                frame = node.receive()
                assert frame.header == Push(number)
                if not believing and [bytes(b) for b in frame.buffers] != [PAYLOAD]:
                    raise Spoiled
            return "done"
    except (NodeLost, BadFrame) as error:
        return type(error).__name__


def answer_all(w: World, believing: bool) -> None:
    """The master's part: answers everything, and checks it unless `believing`."""
    for event in w.events:
        if isinstance(event, FrameReceived):
            if not believing and [bytes(b) for b in event.buffers] != [PAYLOAD]:
                raise Spoiled
            w.server.send(event.peer, event.header, [PAYLOAD])
    w.events.clear()


def try_mischief(w: World, healthy: Connection[Kinds], mischief: Mischief, believing: bool = False) -> str:
    """How a conversation with a man in the middle ends, while a healthy one goes on beside it."""
    with man_in_the_middle(w.address, mischief) as address:
        conversation = w.pool.submit(converse, address, w, believing)
        deadline, number = time.monotonic() + 20, 0
        while not conversation.done():
            assert time.monotonic() < deadline, f"{mischief} is not noticed"
            number += 1
            healthy.send(Push(number), [PAYLOAD])
            while not healthy.wait(0):
                w.events += w.server.poll(0.01)
                answer_all(w, believing)
            assert healthy.receive().header == Push(number)
        assert number > 0
    return conversation.result()


def mischiefs(seed: int, num: int, first: int, last: int) -> list[Mischief]:
    """Random ones of every way and direction, that begin between two bytes of the stream."""
    random = Random(seed)
    return [
        Mischief(
            WAYS[i % len(WAYS)],
            DIRECTIONS[i // len(WAYS) % 2],
            random.randrange(first, last),
            random.choice([1, 2, 30, 700]),
        )
        for i in range(num)
    ]


def _try_all(transport: str, tried: list[Mischief], believing: bool = False) -> None:
    """Require that all of them are noticed, and that mere delays are not."""
    for limits, expected in ((HASTY, False), (PATIENT, True)):
        with world(transport, limits=limits) as w:
            healthy, good = w.join(Limits())
            for mischief in tried:
                if (mischief.way == "delay") == expected:
                    outcome = try_mischief(w, healthy, mischief, believing)
                    assert (outcome == "done") == expected, (mischief, outcome)
            while w.server.peers != [good]:
                w.until(PeerDisconnected)


def test_passive_proxy_is_not_noticed() -> None:
    for transport in ("tcp", "tcp+tls"):
        with world(transport) as w:
            healthy, _ = w.join(Limits())
            assert try_mischief(w, healthy, Mischief("pass")) == "done"


def test_tls_never_delivers_tampered_data() -> None:
    _try_all("tcp+tls", mischiefs(seed=1, num=21, first=0, last=12_000))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tls_never_delivers_tampered_data_in_500_cases() -> None:
    _try_all("tcp+tls", mischiefs(seed=2, num=500, first=0, last=20_000))


@pytest.mark.slow
def test_plain_tcp_rejects_a_tampered_handshake_or_head() -> None:
    _try_all("tcp", mischiefs(seed=3, num=14, first=0, last=GREETING_BYTES))
    heads = [
        Mischief(m.way, m.direction, m.begin, min(m.length, 8))
        for m in mischiefs(4, 14, GREETING_BYTES, GREETING_BYTES + 24)
    ]
    _try_all("tcp", heads)


def test_plain_tcp_detects_lost_or_repeated_payload_at_the_next_head() -> None:
    amid = GREETING_BYTES + 500
    _try_all(
        "tcp",
        [Mischief(way, d, amid, 30) for way in ("repeat", "drop", "cut", "stop") for d in DIRECTIONS],
        believing=True,
    )


def test_plain_tcp_accepts_a_changed_payload_as_documented() -> None:
    with world("tcp", limits=HASTY) as w:
        healthy, _ = w.join(Limits())
        with pytest.raises(Spoiled):
            try_mischief(w, healthy, Mischief("corrupt", "to master", GREETING_BYTES + 500))
