"""A relay joins nodes with a master that they cannot reach; what it does wrong is noticed, and nothing is changed."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from random import Random

import pytest

from evener.wire.connect import open_connection
from evener.wire.connection import Connection
from evener.wire.errors import CannotListen, CannotRelay, NoMaster, WrongSecret
from evener.wire.identity import Address, make_identity
from evener.wire.relay import Relay
from evener.wire.relay_claim import CLAIM_BYTES, MAGIC
from evener.wire.relay_lines import RelayLines
from evener.wire.server_events import FrameReceived, PeerDisconnected
from support.relays import KEY, relay_at
from support.wire_peers import Kinds, Push, World, world
from support.wire_proxy import Mischief, Way, man_in_the_middle

pytestmark = pytest.mark.posix


@contextmanager
def relayed(relay: Address) -> Iterator[tuple[World, list[str]]]:
    """A master with a relay, and what it tells its user."""
    told: list[str] = []
    with world("tcp+tls") as w:
        lines = RelayLines(relay, KEY, 5.0, told.append)
        w.server.listen_by(lines)
        lines.start()
        yield w, told


def exchange(w: World, node: Connection[Kinds], peer: int, payload: bytes) -> None:
    """Send `payload` to the master and back."""
    w.meanwhile(lambda: node.send(Push(1), [payload]))
    message = w.message(peer)
    assert bytes(message.buffers[0]) == payload
    w.server.send(peer, Push(2), [payload])
    assert bytes(w.meanwhile(node.receive).buffers[0]) == payload


def test_nodes_reach_a_master_through_a_relay() -> None:
    with relay_at() as (address, _), relayed(address) as (w, told):
        joined = [w.join(address=address) for _ in range(20)]  # more than the lines that wait
        for number, (node, peer) in enumerate(joined):
            exchange(w, node, peer, Random(number).randbytes(200_000 + number))
        assert not told


def test_end_of_a_connection_passes_through_a_relay() -> None:
    with relay_at() as (address, _), relayed(address) as (w, _):
        node, peer = w.join(address=address)
        w.server.disconnect(peer, "enough")
        with pytest.raises(Exception, match="enough"):
            w.meanwhile(node.receive)
        node, peer = w.join(address=address)
        node.close()
        assert w.until(PeerDisconnected, where=lambda event: event.peer == peer)


def test_other_token_is_refused_through_a_relay() -> None:
    with relay_at() as (address, _), relayed(address) as (w, _):
        token = make_identity().token
        other = type(token)(secret=token.secret, fingerprint=w.identity.token.fingerprint)
        with pytest.raises(WrongSecret):
            w.meanwhile(lambda: open_connection(address, other, Kinds))


def test_relay_refuses_another_key_and_keeps_the_master() -> None:
    with relay_at() as (address, told), relayed(address) as (w, _):
        other = RelayLines(address, "another key of a relay", 5.0, told.append)
        with closing(other), pytest.raises(CannotRelay):
            other.start()
        with socket.create_connection((address.host, address.port)) as stranger:
            stranger.sendall(MAGIC + bytes(CLAIM_BYTES - len(MAGIC)))
            stranger.recv(100)
            stranger.sendall(bytes(32))
            assert stranger.recv(1) == b""
        exchange(w, *w.join(address=address), b"x")
        assert len(told) == 2  # the master came, and the stranger


def test_later_master_takes_the_place_of_an_earlier_one() -> None:
    with relay_at() as (address, _), relayed(address) as (first, told):
        with relayed(address) as (w, _):
            first.server.poll(0.1)  # its lines have ended, so it opens others
            while not told:
                time.sleep(0.01)
            for _ in range(3):
                exchange(w, *w.join(address=address), b"x")
            assert not first.server.peers
        exchange(first, *first.join(address=address), b"x")


def test_node_without_a_master_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener.wire.relay._LINE_SECONDS", 0.3)
    with relay_at() as (address, _), pytest.raises(NoMaster):
        open_connection(address, make_identity().token, Kinds, seconds=60)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request"])
def test_only_a_relay_is_taken_for_one(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener.wire.relay_lines.JOIN_SECONDS", 0.5)
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        closing(RelayLines(Address("127.0.0.1", other.getsockname()[1]), KEY, 5.0, print)) as lines,
        ThreadPoolExecutor(1) as pool,
    ):
        started = pool.submit(lines.start)
        sock, _ = other.accept()
        with sock:
            sock.sendall(answer)
            with pytest.raises(CannotRelay):
                started.result(10)


def test_master_comes_back_to_a_relay_that_was_away() -> None:
    with relay_at() as (address, _):
        pass
    told: list[str] = []
    with world("tcp+tls") as w:
        lines = RelayLines(address, KEY, 5.0, told.append)
        w.server.listen_by(lines)
        lines.start(waits=True)
        while not told:
            time.sleep(0.01)
        for _ in range(2):
            with relay_at(address.port):
                exchange(w, *w.join(address=address), b"x")
    assert len(told) >= 2


@pytest.mark.parametrize("way", ["corrupt", "repeat", "drop", "swap", "cut"])
def test_relay_that_spoils_bytes_changes_nothing(way: Way) -> None:
    with relay_at() as (address, _), relayed(address) as (w, _):
        with man_in_the_middle(address, Mischief(way, "to master", 3_000, 30)) as spoiled:
            node, peer = w.join(address=spoiled)
            w.meanwhile(lambda: node.send(Push(1), [bytes(range(256)) * 1000]))
            assert w.until(PeerDisconnected, seconds=10, where=lambda event: event.peer == peer)
        assert not any(isinstance(event, FrameReceived) for event in w.events)


def test_relay_holds_little_for_a_receiver_that_does_not_read() -> None:
    with relay_at() as (address, _), closing(RelayLines(address, KEY, 5.0, print)) as lines:
        lines.start()
        with socket.create_connection((address.host, address.port)) as sender:
            sender.settimeout(1.0)
            sent = 0
            with suppress(TimeoutError):
                while sent < 2**30:
                    sent += sender.send(bytes(2**16))
            assert sent < 32 * 2**20  # what the system buffers on two connections, and the relay's own 400 KB


def test_relay_listens_at_no_path() -> None:
    with pytest.raises(CannotListen):
        asyncio.run(Relay(KEY).listen(Address(path="/tmp/relay")))
