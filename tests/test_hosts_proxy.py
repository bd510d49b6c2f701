"""The man in the middle does to the bytes what he is told, and otherwise nothing."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hosts.proxy import Proxy
from support.busy_machine import met_once_in

BYTES = os.urandom(1000)


@contextmanager
def echo() -> Iterator[tuple[str, int]]:
    """A server that sends back what it gets, on as many connections as come."""

    def serve() -> None:
        while True:
            peer, _ = server.accept()
            with peer:
                if not answer(peer):
                    return

    def answer(peer: socket.socket) -> bool:
        """Whether to go on."""
        try:
            while data := peer.recv(1 << 16):
                if data == b"end":
                    return False
                peer.sendall(data)
        except ConnectionError:
            return True
        return True

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()
        with socket.create_connection(server.getsockname(), timeout=5) as last:
            last.sendall(b"end")
            thread.join(5)


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(proxy.address, timeout=5)


def exchange(peer: socket.socket, data: bytes, count: int | None = None) -> bytes:
    """What comes back for `data`, `count` bytes of it."""
    peer.sendall(data)
    return receive(peer, len(data) if count is None else count)


def receive(peer: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = peer.recv(count - len(received))
        assert part, "the connection was closed"
        received += part
    return received


def test_bytes_pass_both_ways_with_end_of_stream() -> None:
    with echo() as target, Proxy(target) as proxy, connect(proxy) as peer:
        large = os.urandom(3 << 20)
        sender = threading.Thread(target=peer.sendall, args=(large,))
        sender.start()
        assert receive(peer, len(large)) == large
        sender.join()
        peer.shutdown(socket.SHUT_WR)
        assert peer.recv(1) == b""
        assert proxy.done == []


def test_cut_resets_connections_until_joined() -> None:
    with echo() as target, Proxy(target) as proxy:
        with connect(proxy) as peer:
            assert exchange(peer, BYTES) == BYTES
            proxy.cut()
            with pytest.raises(ConnectionResetError):
                peer.recv(1)
        with pytest.raises(ConnectionResetError), connect(proxy) as peer:
            peer.recv(1)
        proxy.join()
        with connect(proxy) as peer:
            assert exchange(peer, BYTES) == BYTES


def test_missing_target_resets_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = server.getsockname()
    with Proxy(nobody) as proxy:
        with pytest.raises(ConnectionResetError), connect(proxy) as peer:
            peer.recv(1)
        assert "lost a connection" in proxy.done[0]


def test_frozen_connection_is_silent_and_loses_nothing() -> None:
    with echo() as target, Proxy(target) as proxy, connect(proxy) as peer:
        assert exchange(peer, b"before") == b"before"
        proxy.freeze()
        peer.sendall(BYTES)
        peer.settimeout(0.3)
        with pytest.raises(TimeoutError):
            peer.recv(1)
        peer.settimeout(5)
        proxy.thaw()
        assert receive(peer, len(BYTES)) == BYTES


@met_once_in(5)
def test_delayed_bytes_arrive_later_each_way_without_queueing() -> None:
    with echo() as target, Proxy(target) as proxy, connect(proxy) as peer:
        proxy.delay(0.15)
        start = time.monotonic()
        for _ in range(10):
            peer.sendall(b"one by one")
            time.sleep(0.01)
        assert receive(peer, 100) == b"one by one" * 10
        assert 0.3 < time.monotonic() - start < 1.5
        proxy.delay(0)
        assert exchange(peer, BYTES) == BYTES


@pytest.mark.parametrize("direction", ["up", "down"])
def test_one_seeded_bit_of_a_chunk_is_flipped(direction: str) -> None:
    seen = []
    for seed in (1, 1, 2):
        with echo() as target, Proxy(target, seed=seed) as proxy, connect(proxy) as peer:
            assert exchange(peer, BYTES) == BYTES
            proxy.corrupt("up" if direction == "up" else "down")
            changed = exchange(peer, BYTES)
            (bit,) = [i for i in range(8 * len(BYTES)) if (changed[i // 8] ^ BYTES[i // 8]) >> i % 8 & 1]
            assert proxy.done == [f"flipped bit {bit} of 1000 bytes {direction}"]
            assert exchange(peer, BYTES) == BYTES
            seen.append(bit)
    assert seen[0] == seen[1] != seen[2]


def test_one_chunk_is_repeated() -> None:
    with echo() as target, Proxy(target) as proxy, connect(proxy) as peer:
        proxy.duplicate("up")
        assert exchange(peer, BYTES, count=2000) == BYTES + BYTES
        proxy.duplicate("down")
        assert exchange(peer, b"again", count=10) == b"againagain"
        assert exchange(peer, BYTES) == BYTES
        assert proxy.done == ["repeated 1000 bytes up", "repeated 5 bytes down"]
