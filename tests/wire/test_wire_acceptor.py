"""Who has not proved the secret gets nothing done, costs little, and is not kept for long."""

from __future__ import annotations

import socket
import ssl
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TypeAlias

import msgspec
import pytest

from evener.wire.acceptor import PendingPeer, least_trusted
from evener.wire.connect import open_connection
from evener.wire.connection import Connection
from evener.wire.frame import encode_head
from evener.wire.handshake import MESSAGE_BYTES, HandshakeType, MasterHandshake, encode_message
from evener.wire.identity import Address
from evener.wire.limits import Limits
from evener.wire.server_events import FrameReceived, PeerConnected, PeerRefused
from evener.wire.transport import PlainTransport
from support.wire_peers import Hello, Kinds, Push, World, world

Joining: TypeAlias = "Future[Connection[Kinds]]"
HURRIED = Limits(handshake_seconds=0.4)
FRAME = encode_head(0, msgspec.msgpack.encode(Push(1)))


def call(w: World) -> socket.socket:
    """A bare socket to the hub."""
    if w.address.path:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(w.address.path)
    else:
        sock = socket.create_connection((w.address.host, w.address.port))
    sock.settimeout(5)
    return sock


def test_frames_of_an_unauthenticated_peer_are_ignored(transport: str, tmp_path: Path) -> None:
    asked = []

    def place(peer: int, header: Kinds, lengths: tuple[int, ...]) -> None:
        asked.append(header)

    for opening in (
        b"",
        encode_message(HandshakeType.HELLO),
        encode_message(HandshakeType.HELLO) + encode_message(HandshakeType.PROOF),
    ):
        with world(transport, tmp_path, place=place) as w, call(w) as sock:
            sock.sendall(opening + FRAME)
            w.until(PeerRefused)
            assert not any(isinstance(event, PeerConnected | FrameReceived) for event in w.events)
            assert w.server.peers == []
    assert asked == []


def test_frames_inside_tls_without_the_secret_are_ignored() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with world("tcp+tls") as w:
        sock = w.meanwhile(lambda: context.wrap_socket(call(w)))
        with sock:
            sock.sendall(FRAME)
            assert w.until(PeerRefused).reason == "not an Evener client (bad handshake)"
            assert sock.recv(MESSAGE_BYTES) == encode_message(HandshakeType.NO_HELLO)
        assert not any(isinstance(event, PeerConnected | FrameReceived) for event in w.events)


def test_server_rejects_older_tls() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with world("tcp+tls") as w:
        with pytest.raises(OSError, match=r"alert|reset|EOF"):
            w.meanwhile(lambda: context.wrap_socket(call(w)))
        assert "TLS: unsupported protocol" in w.until(PeerRefused).reason


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03\x01\x02\x00\x01" + bytes(600), b"E", b"EVENER\x01\x01", b"\0" * 5000]
)
def test_invalid_handshake_is_rejected_in_time(transport: str, tmp_path: Path, said: bytes) -> None:
    with world(transport, tmp_path, HURRIED) as w, call(w) as sock:
        sock.sendall(said)
        assert w.until(PeerRefused).reason
        assert (
            sock.recv(100) in (b"", encode_message(HandshakeType.NO_HELLO), encode_message(HandshakeType.TLS_HERE))
            or "tls" in transport
        )


def test_silent_peer_is_closed_after_the_handshake_timeout(transport: str, tmp_path: Path) -> None:
    with world(transport, tmp_path, HURRIED) as w, call(w) as sock:
        began = time.monotonic()
        assert w.until(PeerRefused).reason == "it did not prove the secret within 0.4 s"
        assert time.monotonic() - began > 0.3
        assert sock.recv(1) == b""


def test_dripping_peer_is_closed_after_the_handshake_timeout() -> None:
    with world(limits=HURRIED) as w, call(w) as sock:
        for byte in encode_message(HandshakeType.HELLO):  # in 2 s at least
            sock.send(bytes([byte]))
            w.events += w.server.poll(0.05)
            if any(isinstance(event, PeerRefused) for event in w.events):
                break
        else:
            raise AssertionError("all forty bytes were waited for")
        assert w.until(PeerRefused).reason == "it did not prove the secret within 0.4 s"


def test_flood_of_peers_is_bounded_and_a_node_still_joins(transport: str, tmp_path: Path) -> None:
    limits = Limits(pending=10, handshake_seconds=30)
    with world(transport, tmp_path, limits) as w:
        healthy, good = w.join()
        flood = [call(w) for _ in range(60)]
        w.meanwhile(lambda: time.sleep(0.05))
        while sum(isinstance(event, PeerRefused) for event in w.events) < 50:
            w.events += w.server.poll(0.05)
        assert len(w.server._acceptor._pending) == 10
        reasons = {event.reason for event in w.events if isinstance(event, PeerRefused)}
        assert reasons == {"too many pending connections have not proved the secret"}
        node, peer = w.join()
        for member, number in ((healthy, good), (node, peer)):
            member.send(Hello("still here"))
            assert w.message(number).header == Hello("still here")
        for sock in flood:
            sock.close()


@pytest.mark.parametrize(
    ("present", "leaves"),
    [
        (["a silent", "b silent"], 0),
        (["a spoken", "b silent"], 1),
        (["a spoken", "b spoken", "a spoken"], 0),
        (["b silent", "a spoken", "a silent"], 2),
        (["b silent", "a spoken", "c silent", "a spoken"], 1),
    ],
)
def test_least_trusted_peer_is_silent_and_oldest_of_the_largest_host(present: list[str], leaves: int) -> None:
    with world() as w:
        strangers: list[PendingPeer] = []
        for age, (host, manner) in enumerate(reversed([who.split() for who in present])):
            channel = PlainTransport(socket.socket())
            channel.wire_bytes_received = 40 * (manner == "spoken")
            stranger = PendingPeer(channel, MasterHandshake(w.identity.token, bytes(32)), Address(host, 1))
            stranger.age = age
            strangers.insert(0, stranger)
        assert strangers.index(least_trusted(strangers)) == leaves
        for stranger in strangers:
            stranger.transport.sock.close()


@pytest.mark.posix
def test_steady_flood_blocks_no_node_and_grows_no_memory() -> None:
    import resource

    with world(limits=Limits(pending=16)) as w:
        stop = False

        def flood() -> int:
            count = 0
            while not stop:
                with call(w) as sock:
                    sock.sendall(b"x" * 100)
                    count += 1
            return count

        flooding = w.pool.submit(flood)
        for _ in range(300):
            w.server.poll(0.005)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(5):
            node, peer = w.join()
            node.send(Push(number))
            assert w.message(peer).header == Push(number)
            w.events.clear()
        until = time.monotonic() + 1
        while time.monotonic() < until:
            w.server.poll(0.05)
        stop = True
        assert w.meanwhile(flooding.result) > 100
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4000


def test_handshake_timeout_excludes_time_when_the_master_was_busy() -> None:
    with world(limits=Limits(handshake_seconds=0.8)) as w:
        joining: Joining = w.pool.submit(open_connection, w.address, w.identity.token, Kinds)
        w.events += w.server.poll(0.02)
        time.sleep(1.6)  # the master merges
        w.until(PeerConnected)
        joining.result(timeout=5).close()


@pytest.mark.posix
def test_master_recovers_from_a_lack_of_file_descriptors() -> None:
    import resource

    with world() as w:
        healthy, good = w.join()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken = [socket.socket()]
        try:
            with call(w):
                resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0].fileno() + 2, hard))
                while True:
                    try:
                        taken.append(socket.socket())
                    except OSError:
                        break
                busy = time.thread_time()
                w.events += w.server.poll(0.3)
                assert time.thread_time() - busy < 0.15, "the door was looked at again and again"
                healthy.send(Hello("still served"))
                assert w.message(good).header == Hello("still served")
        finally:
            for sock in taken:
                sock.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        joining: Joining = w.pool.submit(open_connection, w.address, w.identity.token, Kinds)
        w.until(PeerConnected)
        joining.result(timeout=5).close()
