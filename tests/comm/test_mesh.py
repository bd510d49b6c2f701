"""Small messages between all ranks: in order, of any size on request, and only from those who know the secret."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from evener.comm.mesh import Mesh
from evener.comm.mesh_joining import join_mesh
from evener.comm.signed_store import SignedStore
from evener.records.errors import NodeLost, OutOfStep
from evener.wire.handshake import HandshakeType, encode_message
from support.refusals import refused
from support.stores import SECRET, memory_store


def together(size: int, work: Callable[[Mesh], Any], patience: float = 10, longest_wait: float = 5) -> list[Any]:
    """What `work` returns on every rank of a mesh of threads."""
    store, names = memory_store(), [f"n{i}" for i in range(size)]

    def rank(i: int) -> Any:
        mesh = join_mesh(
            rank=i, nodes=names, store=store, address="127.0.0.1", patience=patience, longest_wait=longest_wait
        )
        try:
            return work(mesh)
        finally:
            mesh.close()

    with ThreadPoolExecutor(size) as pool:
        return [future.result(30) for future in [pool.submit(rank, i) for i in range(size)]]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_rank_receives_all_messages_in_rank_order(size: int) -> None:
    heard = together(size, lambda mesh: mesh.begin_exchange(bytes([mesh.rank]))())
    assert heard == [[bytes([i]) for i in range(size)]] * size


def test_messages_sent_ahead_arrive_in_order() -> None:
    def work(mesh: Mesh) -> list[list[bytes]]:
        mesh.send(b"first")
        mesh.send(f"second {mesh.rank}".encode())
        return [mesh.receive(), mesh.receive()]

    assert together(3, work) == [[[b"first"] * 3, [b"second 0", b"second 1", b"second 2"]]] * 3


def test_large_messages_of_different_sizes_do_not_block() -> None:
    sizes = [3, 9_000_000, 40_000]
    heard = together(3, lambda mesh: mesh.all_gather(bytes([mesh.rank]) * sizes[mesh.rank]))
    assert [[len(m) for m in row] for row in heard] == [sizes] * 3
    assert heard[0][1] == b"\1" * sizes[1]


def test_subset_renumbers_its_ranks() -> None:
    def work(mesh: Mesh) -> list[bytes] | None:
        return mesh.subset([1, 2]).begin_exchange(str(mesh.rank).encode())() if mesh.rank else None

    assert together(3, work) == [None, [b"1", b"2"], [b"1", b"2"]]


def test_rank_that_closes_its_connection_is_named() -> None:
    def work(mesh: Mesh) -> str:
        if mesh.rank == 1:
            return ""
        with refused(NodeLost) as lost:
            mesh.receive_from(1)
        return str(lost.value)

    assert together(2, work)[0]


def test_rank_that_is_silent_too_long_is_named() -> None:
    done = threading.Event()

    def work(mesh: Mesh) -> str:
        if mesh.rank == 1:
            done.wait(10)
            return ""
        with refused(NodeLost) as lost, mesh.within(0.2):
            mesh.all_gather(b"")
        done.set()
        assert mesh.peers[1].sock.gettimeout() == 5
        return str(lost.value)

    assert together(2, work)[0]


def test_missing_rank_is_named_within_the_patience() -> None:
    store = memory_store()
    with refused(NodeLost):
        join_mesh(rank=0, nodes=["a", "b"], store=store, address="127.0.0.1", patience=0.3, longest_wait=1)


def test_unreachable_address_is_named_with_host_and_port() -> None:
    store = memory_store()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    store.set("mesh/0", f"127.0.0.1 {port}")
    with pytest.raises(NodeLost, match=rf"node b cannot reach node a \(rank 0\) at 127.0.0.1:{port}: .*port open"):
        join_mesh(rank=1, nodes=["a", "b"], store=store, address="127.0.0.1", patience=1, longest_wait=1)


HELLO = encode_message(HandshakeType.HELLO, b"n" * 32)
PROOF = encode_message(HandshakeType.PROOF, b"p" * 32)


@pytest.mark.parametrize(
    "greeting",
    [b"", b"GET / HTTP/1.0\r\n\r\n", b"y" * 32 + struct.pack("<I", 1), b"\xff" * 64, HELLO + PROOF + b"\1\0\0\0"],
)
def test_unauthenticated_connection_is_ignored(greeting: bytes) -> None:
    store, found = memory_store(), list[list[bytes]]()

    def rank(i: int) -> None:
        mesh = join_mesh(rank=i, nodes=["a", "b"], store=store, address="127.0.0.1", patience=10, longest_wait=5)
        found.append(mesh.begin_exchange(bytes([i]))())
        mesh.close()

    first = threading.Thread(target=rank, args=(0,))
    first.start()
    host, port = store.get("mesh/0").decode().split()
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(greeting)
        if len(greeting) < 40:
            stranger.shutdown(socket.SHUT_WR)
        second = threading.Thread(target=rank, args=(1,))
        second.start()
        first.join(15)
        second.join(15)
    assert found == [[b"\0", b"\1"]] * 2


class Tap:
    """A port that passes one connection on to rank 0 of a mesh, and keeps what crosses it."""

    def __init__(self, store: SignedStore) -> None:
        self._target = store.get("mesh/0").decode().split()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.sent, self.received = bytearray(), bytearray()
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        with self._listener:
            node, _ = self._listener.accept()
        master = socket.create_connection((self._target[0], int(self._target[1])))
        back = threading.Thread(target=self._copy, args=(master, node, self.received))
        back.start()
        self._copy(node, master, self.sent)
        back.join(10)
        node.close()
        master.close()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket, seen: bytearray) -> None:
        while data := source.recv(4096):
            seen += data
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._threads[0].join(10)


def join(rank: int, store: SignedStore, patience: float = 10) -> Mesh:
    return join_mesh(
        rank=rank, nodes=["a", "b"], store=store, address="127.0.0.1", patience=patience, longest_wait=5
    )  # fmt: skip


def through(port: int, secret: bytes = SECRET) -> SignedStore:
    """What a rank 1 finds that reaches rank 0 at `port` and believes in `secret`."""
    other = memory_store(secret)
    other.set("mesh/0", f"127.0.0.1 {port}")
    return other


def test_secret_is_never_sent_and_a_replay_is_rejected() -> None:
    store = memory_store()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(join, 0, store)
        tap = Tap(store)
        second = join(1, through(tap.port))
        for mesh in (second, first.result(10)):
            mesh.close()
        tap.close()
        crossed = bytes(tap.sent + tap.received)
        assert len(crossed) == 4 * 40 + 4 + 4 + 16
        assert not any(part in crossed for part in (SECRET, SECRET.hex().encode(), SECRET[:8]))

        store = memory_store()
        again = pool.submit(join, 0, store, 1.0)
        host, port = store.get("mesh/0").decode().split()
        with socket.create_connection((host, int(port))) as replaying:
            replaying.sendall(bytes(tap.sent))
            with refused(NodeLost):
                again.result(10)


@pytest.mark.parametrize("mischief", ["changed", "repeated", "reflected"])
def test_message_not_signed_by_its_sender_is_rejected(mischief: str) -> None:
    store = memory_store()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(join, 0, store)
        second = join(1, store)
        mesh = first.result(10)
    sender, receiver = second.peers[0], mesh.peers[1]
    second.send_to(0, b"a gradient")
    signed = bytes(receiver.sock.recv(100))
    forged = signed if mischief == "reflected" else signed.replace(b"gradient", b"Gradient")
    if mischief == "reflected":
        receiver.sock.sendall(forged)
        target = second
    else:
        sender.sock.sendall(signed + signed if mischief == "repeated" else forged)
        target = mesh
        if mischief == "repeated":
            assert mesh.receive_from(1) == b"a gradient"
    with refused(NodeLost):
        target.receive_from(1 - target.rank)
    for one in (mesh, second):
        one.close()


def test_silent_connections_do_not_delay_a_rank() -> None:
    store = memory_store()
    with ThreadPoolExecutor(1) as pool, ExitStack() as strangers:
        first = pool.submit(join, 0, store)
        host, port = store.get("mesh/0").decode().split()
        for _ in range(100):  # more than the handshakes that go on at the same time
            strangers.enter_context(socket.create_connection((host, int(port)))).sendall(HELLO[:20])
        began = time.monotonic()
        second = join(1, store)
        for mesh in (second, first.result(10)):
            mesh.close()
    assert time.monotonic() - began < 4


def test_rank_with_another_secret_is_rejected() -> None:
    store = memory_store()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(join, 0, store)
        port = int(store.get("mesh/0").decode().split()[1])
        with refused(NodeLost):
            join(1, through(port, b"another secret.."), 2.0)
        second = join(1, store)
        for mesh in (second, first.result(10)):
            mesh.close()


def test_mismatched_calls_are_named_on_both_ranks() -> None:
    def work(mesh: Mesh) -> dict[str, str]:
        with pytest.raises(OutOfStep) as raised:
            mesh.all_gather(b"12345678", ("the next batch", "the end of the program")[mesh.rank])
        return raised.value.calls

    assert together(2, work) == [{"n0": "the next batch", "n1": "the end of the program"}] * 2
