"""A join that fails says within its time limit where, why and what to do."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.records.errors import NodeLost
from evener.wire import connect
from evener.wire.connect import backoff, open_connection
from evener.wire.connection import Connection
from evener.wire.errors import (
    CannotJoin,
    CannotResolve,
    MasterFull,
    NoAnswer,
    NotAMaster,
    NothingListens,
    NoUnixSockets,
    OtherMaster,
    TransportDiffers,
    VersionDiffers,
    WrongSecret,
)
from evener.wire.handshake import MESSAGE_BYTES
from evener.wire.identity import Address, Token, make_identity
from evener.wire.limits import Limits
from evener.wire.server_events import PeerConnected, PeerRefused
from support.refusals import refused
from support.wire_peers import INSECURE, SECURE, Hello, Kinds, Push, world

TOKENS = pytest.mark.parametrize("token", [SECURE.token, INSECURE.token], ids=["tls", "plain"])


@contextmanager
def stub(answer: bytes | None, *, listens: bool = True, closes: bool = False) -> Iterator[Address]:
    """Something that is no master: says `answer` to whoever connects, then is silent or closes."""
    door = socket.create_server(("127.0.0.1", 0))
    callers: list[socket.socket] = []

    def serve() -> None:
        with door:
            caller, _ = door.accept()
            callers.append(caller)
            if answer is not None:
                caller.sendall(answer)
            if closes:
                caller.close()

    thread = threading.Thread(target=serve)
    thread.start()
    address = Address("127.0.0.1", door.getsockname()[1])
    yield address
    thread.join(5)
    for caller in callers:
        caller.close()


def join(address: Address, token: Token, seconds: float = 5.0) -> Connection[Kinds]:
    return open_connection(address, token, Kinds, seconds=seconds)


@pytest.mark.posix
@TOKENS
def test_unused_port_raises_nothing_listens(token: Token, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    sentence = (
        f"cannot reach the master at 127.0.0.1, port {port}: the machine is there, but nothing listens at that port; "
        "start `evener up` on it, or check the port"
    )
    with pytest.raises(NothingListens) as refused:
        join(Address("127.0.0.1", port), token)
    assert str(refused.value) == sentence
    assert isinstance(refused.value, NodeLost)
    with pytest.raises(NothingListens, match=f"unix socket {tmp_path}/none"):
        join(Address(path=str(tmp_path / "none")), token)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_wildcard_address_is_dialled_and_named_as_localhost(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    with pytest.raises(NothingListens) as refused:
        join(Address(host, port), INSECURE.token)
    assert refused.value.place == Address("localhost", port).description


def test_unknown_host_name_raises_cannot_resolve() -> None:
    with refused(CannotResolve):
        join(Address("no-such-machine.invalid", 7), INSECURE.token)
    with refused(CannotResolve):
        join(Address("x" * 300, 7), INSECURE.token)


def test_hanging_name_service_raises_cannot_resolve_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    def hang(*_: object, flags: int = 0, **__: object) -> list[object]:
        if flags:
            raise socket.gaierror("not numeric")
        answered.wait(10)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    began = time.monotonic()
    with refused(CannotResolve):
        join(Address("gpu-box", 7), INSECURE.token, seconds=0.3)
    assert time.monotonic() - began < 5  # of the ten that the name service takes
    answered.set()


def test_full_backlog_raises_no_answer_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    full = socket.create_server(("127.0.0.1", 0), backlog=0)
    address = Address("127.0.0.1", full.getsockname()[1])
    waiting = [socket.socket() for _ in range(4)]
    for sock in waiting:
        sock.setblocking(False)
        sock.connect_ex(full.getsockname())  # fills the queue: the kernel answers further ones with silence
    began = time.monotonic()
    with refused(NoAnswer):
        join(address, INSECURE.token, seconds=0.6)
    assert time.monotonic() - began < 10  # the system itself would try for two minutes
    for sock in (full, *waiting):
        sock.close()


def test_unreachable_network_raises_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(connect, "_connect", unreachable)
    with refused(NoAnswer):
        join(Address("127.0.0.1", 7), INSECURE.token)


@TOKENS
@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100), b"\0"]
)
def test_other_service_on_the_port_raises_not_a_master(token: Token, answer: bytes) -> None:
    with (
        stub(answer) as address,
        refused(NotAMaster) as seen,
    ):
        join(address, token)
    assert str(answer[:3])[2:-1] in str(seen.value)


@TOKENS
def test_silent_listener_raises_not_a_master_in_time(token: Token) -> None:
    began = time.monotonic()
    with (
        stub(None) as address,
        refused(NotAMaster),
    ):
        join(address, token, seconds=0.4)
    assert time.monotonic() - began < 10  # the patience alone is 15 s


@TOKENS
def test_listener_that_closes_raises_not_a_master(token: Token) -> None:
    with (
        stub(None, closes=True) as address,
        pytest.raises(NotAMaster, match=r"handshake broke off|closed during the TLS handshake"),
    ):
        join(address, token)


def test_dripping_bytes_do_not_extend_the_timeout() -> None:
    door = socket.create_server(("127.0.0.1", 0))

    def drip() -> None:
        caller, _ = door.accept()
        with caller:
            for byte in b"EVENER\x01\x02" + bytes(32):
                try:
                    caller.sendall(bytes([byte]))
                except OSError:
                    return
                time.sleep(0.25)

    thread = threading.Thread(target=drip)
    thread.start()
    began = time.monotonic()
    with door, refused(NotAMaster):
        join(Address("127.0.0.1", door.getsockname()[1]), INSECURE.token, seconds=0.5)
    assert time.monotonic() - began < 5  # all bytes would take ten seconds
    thread.join(15)


def test_tls_token_at_an_insecure_master_raises_transport_differs() -> None:
    for theirs, ours in (("tcp", SECURE), ("tcp+tls", INSECURE)):
        with world(theirs) as w:
            with refused(TransportDiffers):
                w.meanwhile(lambda: join(w.address, ours.token))  # noqa: B023
            assert w.until(PeerRefused).origin.startswith("127.0.0.1, port ")
            assert w.server.peers == []


def test_token_of_another_master_raises_other_master() -> None:
    with (
        world("tcp+tls") as w,
        refused(OtherMaster),
    ):
        w.meanwhile(lambda: join(w.address, make_identity().token))


def test_wrong_secret_is_rejected(transport: str, tmp_path: Path) -> None:
    with world(transport, tmp_path) as w:
        wrong = Token(secret=bytes(16), fingerprint=w.identity.token.fingerprint)
        with refused(WrongSecret):
            w.meanwhile(lambda: join(w.address, wrong))
        assert w.until(PeerRefused).reason == "it does not know the secret"
        assert not any(isinstance(event, PeerConnected) for event in w.events)


def test_other_wire_version_raises_version_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    other = b"EVENER\x02\x11" + bytes(MESSAGE_BYTES - 8)
    with stub(other) as address, refused(VersionDiffers):
        join(address, INSECURE.token)


def test_full_master_raises_master_full() -> None:
    with world(limits=Limits(connections=1)) as w:
        first, _ = w.join()
        with refused(MasterFull):
            w.meanwhile(lambda: join(w.address, w.identity.token))
        first.close()
        w.meanwhile(lambda: w.pool.submit(time.sleep, 0.01).result())
        w.join()


def test_only_five_join_errors_are_permanent() -> None:
    lasting = {error for error in CannotJoin.__subclasses__() if error.lasting}
    assert lasting == {NoUnixSockets, TransportDiffers, VersionDiffers, OtherMaster, WrongSecret}


def test_node_joins_and_exchanges_frames_with_the_master(transport: str, tmp_path: Path) -> None:
    with world(transport, tmp_path) as w:
        node, peer = w.join()
        node.send(Hello("it is me"))
        assert w.message(peer).header == Hello("it is me")
        w.server.send(peer, Push(1))
        assert w.meanwhile(node.receive).header == Push(1)


@given(st.integers(0, 2**32), st.floats(0.01, 1), st.floats(1, 60))
def test_backoff_pauses_double_up_to_a_maximum_with_jitter(seed: int, first: float, longest: float) -> None:
    drawn = list(itertools.islice(backoff(Random(seed), first, longest), 20))
    for number, pause in enumerate(drawn):
        whole = min(first * 2**number, longest)
        assert whole / 2 <= pause <= whole


def test_two_nodes_retry_at_different_times() -> None:
    assert list(itertools.islice(backoff(Random(1)), 9)) != list(itertools.islice(backoff(Random(2)), 9))
