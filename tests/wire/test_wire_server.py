"""The hub serves many at once; nobody's slowness, death or malice is anybody else's."""

from __future__ import annotations

import errno
import gc
import socket
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from evener.records.errors import InvalidValue
from evener.wire.connect import open_connection
from evener.wire.connection import Connection
from evener.wire.errors import BadFrame, CannotListen
from evener.wire.identity import Address
from evener.wire.limits import Limits
from evener.wire.server import DISK_FULL, FAILED, MAX_POLL_BYTES, MAX_TURN_FRAMES
from evener.wire.server_events import FrameReceived, PeerConnected, PeerDisconnected, PeerFailed
from support.busy_machine import met_once_in
from support.refusals import refused
from support.wire_peers import QUICK, Hello, Kinds, Push, World, world

BIG = 20_000_000


def echo(w: World, node: Connection[Kinds], peer: int, number: int) -> None:
    """One small exchange with a healthy node, which has to be quick."""
    began = time.monotonic()
    node.send(Push(number), [b"abc"])
    message = w.message(peer)
    w.server.send(peer, Push(number), message.buffers)
    assert w.meanwhile(node.receive).header == Push(number)
    assert time.monotonic() - began < 5


def test_hundred_connections_are_served_at_once(transport: str, tmp_path: Path) -> None:
    num_nodes, rounds = 100, 3
    with world(transport, tmp_path) as w:
        nodes: list[Connection[Kinds]] = w.meanwhile(
            lambda: [open_connection(w.address, w.identity.token, Kinds) for _ in range(num_nodes)], seconds=60
        )
        peers = [w.until(PeerConnected).peer for _ in range(num_nodes)]
        assert sorted(w.server.peers) == sorted(peers)
        for number in range(rounds):
            for index, node in enumerate(nodes):
                node.send(Push(number), [index.to_bytes(2, "little") * 500])
            seen = set()
            for _ in range(num_nodes):
                message: FrameReceived[Kinds] = w.until(FrameReceived)
                seen.add(bytes(message.buffers[0][:2]))
                w.server.send(message.peer, message.header, message.buffers)
            assert len(seen) == num_nodes
            frames = w.meanwhile(lambda: [node.receive() for node in nodes], seconds=60)
            for index, frame in enumerate(frames):
                assert bytes(frame.buffers[0]) == index.to_bytes(2, "little") * 500
        for node in nodes:
            node.close()
        for _ in range(num_nodes):
            w.until(PeerDisconnected)
        assert w.server.peers == []


def test_sent_memory_is_released_only_after_sending(transport: str, tmp_path: Path) -> None:
    with world(transport, tmp_path) as w:
        node, peer = w.join()
        weights = np.zeros(BIG, np.uint8)
        alive = weakref.ref(weights)
        w.server.send(peer, Push(1), [weights])
        w.events += w.server.poll(0.05)
        del weights
        assert w.server.is_sending(peer)
        assert alive() is not None, "the kernel cannot hold all of it, and the hub has no copy"
        frame = w.meanwhile(node.receive)
        w.sent(peer)
        assert alive() is None
        assert frame.buffers[0].nbytes == BIG


def test_sent_memory_may_change_after_sending(transport: str, tmp_path: Path) -> None:
    with world(transport, tmp_path) as w:
        node, peer = w.join()
        weights = np.zeros(BIG, np.uint8)
        receiving = w.pool.submit(node.receive)
        for number in range(1, 4):
            w.server.send(peer, Push(number), [weights])
            w.sent(peer)
            weights += 1  # in place, while much of it is still in the kernel
            frame = w.meanwhile(receiving.result)
            assert frame.header == Push(number)
            assert np.all(np.frombuffer(frame.buffers[0], np.uint8) == number - 1)
            receiving = w.pool.submit(node.receive)
        node.close()


def test_peer_that_reads_nothing_is_closed_and_blocks_no_other(transport: str, tmp_path: Path) -> None:
    with world(transport, tmp_path, QUICK) as w:
        healthy, good = w.join(Limits())
        _, bad = w.join(Limits())
        weights = np.zeros(BIG, np.uint8)
        alive = weakref.ref(weights)
        w.server.send(bad, Push(0), [weights])
        del weights
        w.server.send(bad, Hello("queued behind it"))
        began = time.monotonic()
        for number in range(20):
            echo(w, healthy, good, number)
        reason = w.until(PeerDisconnected).reason
        assert reason == "it received nothing for 0.4 s, with 2 frames waiting for it"
        assert time.monotonic() - began > 0.3
        assert w.server.peers == [good]
        gc.collect()
        assert alive() is None
        echo(w, healthy, good, 99)


def test_peer_that_stops_within_a_frame_is_closed(transport: str, tmp_path: Path) -> None:
    with world(transport, tmp_path, QUICK) as w:
        healthy, good = w.join(Limits())
        stuck, bad = w.join(Limits())
        frame = b"".join(_frame(stuck, [bytes(100_000)]))
        stuck._transport.send([memoryview(frame[:70_000])])
        stuck._transport.flush()
        for number in range(20):
            echo(w, healthy, good, number)
        assert w.until(PeerDisconnected) == PeerDisconnected(bad, "it stopped within a frame for 0.4 s")
        echo(w, healthy, good, 99)


def _frame(node: Connection[Kinds], buffers: list[bytes]) -> Iterator[memoryview]:
    from evener.wire.frame import encode_frame

    yield from encode_frame(node._sequence, Push(1), buffers, Limits())


@pytest.mark.parametrize("transport", ["tcp", pytest.param("unix+tls", marks=pytest.mark.posix)])
def test_slow_peer_with_progress_stays_connected(transport: str, tmp_path: Path) -> None:
    with world(transport, tmp_path, QUICK) as w:
        slow, peer = w.join(Limits())
        whole = b"".join(_frame(slow, [bytes(range(256)) * 40]))

        def drip() -> None:
            for begin in range(0, len(whole), 1500):
                slow._transport.send([memoryview(whole[begin : begin + 1500])])
                time.sleep(0.15)

        began = time.monotonic()
        w.meanwhile(drip)
        assert bytes(w.message(peer).buffers[0]) == bytes(range(256)) * 40
        assert time.monotonic() - began > QUICK.patience * 2


def test_vanished_node_is_reported_at_once(transport: str, tmp_path: Path) -> None:
    with world(transport, tmp_path) as w:
        node, peer = w.join()
        node._shut()
        assert w.until(PeerDisconnected) == PeerDisconnected(peer, "it closed without a reason")
        node, peer = w.join()
        node._transport.send([memoryview(b"EVNR")])
        node._shut()
        assert w.until(PeerDisconnected, seconds=1) == PeerDisconnected(peer, "cut off within a frame")


def test_bad_bytes_close_only_their_connection(transport: str, tmp_path: Path) -> None:
    with world(transport, tmp_path) as w:
        healthy, good = w.join()
        node, bad = w.join()
        node._transport.send([memoryview(bytes(100))])
        closed = w.until(PeerDisconnected)
        assert closed.peer == bad
        assert closed.reason.startswith("a frame begins with b'EVNR'")
        with pytest.raises(Exception, match="it said: a frame begins with"):
            node.receive()
        echo(w, healthy, good, 1)


def test_frames_queued_for_a_peer_are_limited(transport: str, tmp_path: Path) -> None:
    with world(transport, tmp_path, Limits(queued_frames=5)) as w:
        _, peer = w.join()
        w.server.send(peer, Push(0), [bytes(BIG)])
        for number in range(1, 5):
            w.server.send(peer, Push(number))
        assert w.server.peers == [peer]
        w.server.send(peer, Push(5))
        assert w.until(PeerDisconnected) == PeerDisconnected(
            peer, "it receives too slowly: 5 frames wait for it, which is the limit"
        )


def test_send_to_a_departed_peer_is_ignored() -> None:
    with world() as w:
        _, peer = w.join()
        w.server.disconnect(peer, "enough")
        w.server.send(peer, Push(1))
        w.server.disconnect(peer, "twice is once")
        assert [e for e in w.server.poll(0.05) if isinstance(e, PeerDisconnected)] == [PeerDisconnected(peer, "enough")]


def test_peer_numbers_are_never_reused() -> None:
    with world() as w:
        seen = []
        for _ in range(3):
            node, peer = w.join()
            node.close()
            w.until(PeerDisconnected)
            seen.append(peer)
        assert seen == [0, 1, 2]


def test_payload_without_memory_is_dropped_and_its_header_delivered(transport: str, tmp_path: Path) -> None:
    with world(transport, tmp_path, place=lambda peer, header, lengths: None) as w:
        node, peer = w.join()
        for number in range(3):
            w.meanwhile(partial(node.send, Push(number), [bytes(BIG)]))
        assert [w.message(peer) for _ in range(3)] == [FrameReceived(peer, Push(i), ()) for i in range(3)]
        assert w.server._peers[peer].transport.wire_bytes_received > 3 * BIG


@pytest.mark.parametrize("who", ["itself", "the other"])
def test_place_may_disconnect_any_peer(who: str, transport: str, tmp_path: Path) -> None:
    def place(peer: int, header: Kinds, lengths: tuple[int, ...]) -> list[bytearray]:
        w.server.disconnect(peer if who == "itself" else 1 - peer, "place says so")
        return [bytearray(n) for n in lengths]

    with world(transport, tmp_path, place=place) as w:
        nodes = [w.join()[0] for _ in range(2)]
        for node in nodes:
            node.send(Push(1), [b"abc"])
        closed = w.until(PeerDisconnected)
        assert closed.reason == "place says so"
        for _ in range(3):
            w.events += w.server.poll(0.02)
        assert not any(
            event.peer == closed.peer for event in w.events if isinstance(event, FrameReceived | PeerDisconnected)
        )
        assert closed.peer not in w.server.peers


def test_place_and_on_part_may_send_and_reject() -> None:
    def place(peer: int, header: Kinds, lengths: tuple[int, ...]) -> list[bytearray]:
        w.server.send(peer, Hello("go on"))
        return [bytearray(n) for n in lengths]

    def on_part(peer: int, header: Kinds, received: int, is_whole: bool) -> bool:
        if received > 1_000_000:
            raise BadFrame("part 1 of the update is not finite")
        return False

    with world(place=place, on_part=on_part) as w:
        node, peer = w.join()
        sending = w.pool.submit(node.send, Push(1), [bytes(3_000_000)])
        assert w.until(PeerDisconnected) == PeerDisconnected(peer, "part 1 of the update is not finite")
        assert sending.exception(timeout=5) is None or "not finite" in str(sending.exception())


@pytest.mark.parametrize("error", [KeyError("a bug of ours"), MemoryError(), OSError(28, "full"), BlockingIOError()])
def test_error_in_place_disconnects_only_that_peer(error: Exception) -> None:
    def place(peer: int, header: Kinds, lengths: tuple[int, ...]) -> list[bytearray]:
        if header == Push(1):
            raise error
        return [bytearray(length) for length in lengths]

    with world(place=place) as w:
        node, peer = w.join()
        other, other_peer = w.join()
        node.send(Push(1), [b"abc"])
        assert w.until(PeerFailed) == PeerFailed(peer, error)
        reason = DISK_FULL if isinstance(error, OSError) and error.errno == errno.ENOSPC else FAILED
        assert w.until(PeerDisconnected) == PeerDisconnected(peer, reason)
        other.send(Push(2), [b"abc"])
        assert w.until(FrameReceived).peer == other_peer


def test_poll_returns_when_the_queue_of_a_peer_is_empty(transport: str, tmp_path: Path) -> None:
    with world(transport, tmp_path) as w:
        node, peer = w.join()
        w.server.send(peer, Push(1), [bytes(BIG)])
        receiving = w.pool.submit(node.receive)
        began = time.monotonic()
        while w.server.is_sending(peer):
            assert w.server.poll(20) == []
        assert time.monotonic() - began < 10
        assert receiving.result(timeout=5).header == Push(1)


@met_once_in(5)
def test_idle_poll_takes_the_requested_time_and_no_cpu(transport: str, tmp_path: Path) -> None:
    with world(transport, tmp_path) as w:
        w.join()
        w.server.poll(0.1)
        began, busy = time.monotonic(), time.thread_time()
        assert w.server.poll(0.5) == []
        assert 0.5 <= time.monotonic() - began < 0.7
        assert time.thread_time() - busy < 0.1


@pytest.mark.posix
def test_server_listens_at_several_addresses(tmp_path: Path) -> None:
    with world() as w:
        doors = [
            w.server.listen(Address(path=str(tmp_path / "door"))),
            w.server.listen(Address("127.0.0.1")),
            w.address,
        ]
        assert len({str(door) for door in doors}) == 3
        assert all(door.port or door.path for door in doors)
        for number, door in enumerate(doors):
            node, peer = w.join(address=door)
            echo(w, node, peer, number)


@pytest.mark.parametrize(
    ("host", "through"), [("", "127.0.0.1"), ("", "::1"), ("::1", "::1"), ("localhost", "localhost")]
)
def test_server_listens_on_ipv4_and_ipv6(host: str, through: str) -> None:
    if through == "::1" and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    with world() as w:
        door = w.server.listen(Address(host))
        future: Future[Connection[Kinds]] = w.pool.submit(
            open_connection, Address(through, door.port), w.identity.token, Kinds
        )
        opened = w.until(PeerConnected)
        assert opened.origin.startswith({"127.0.0.1": "127.0.0.1, port", "::1": "::1, port"}.get(through, ""))
        future.result(timeout=5).close()


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.posix
def test_failed_listen_gives_its_reason(tmp_path: Path) -> None:
    with world() as w:
        for address, why in [
            (w.address, "Address already in use"),
            (Address("192.0.2.1", 0), "Cannot assign requested address"),
            (Address("x" * 300, 0), "no valid name"),
            (Address(path=str(tmp_path / "no" / "folder")), "No such file or directory"),
        ]:
            with pytest.raises(CannotListen, match=f"cannot listen at .*: .*{why}"):
                w.server.listen(address)


@pytest.mark.posix
def test_unix_socket_is_private_exclusive_and_removed_on_close(tmp_path: Path) -> None:
    path = tmp_path / "hub"
    with world("unix", tmp_path) as w:
        assert path.stat().st_mode & 0o777 == 0o600
        with refused(CannotListen):
            w.server.listen(Address(path=str(path)))
        node, _ = w.join()
        node.close()
    assert not path.exists()
    path.write_text("a file of somebody's")
    with world() as w, refused(CannotListen):
        w.server.listen(Address(path=str(path)))
    assert path.read_text() == "a file of somebody's"


@pytest.mark.posix
def test_unix_socket_of_a_killed_master_is_reused(tmp_path: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "hub"))
    left.close()
    assert (tmp_path / "hub").exists()
    with world("unix", tmp_path) as w:
        w.join()


@pytest.mark.parametrize("transport", ["tcp", "tcp+tls"])
@pytest.mark.slow
@pytest.mark.posix
def test_memory_does_not_grow_with_messages_or_connections(transport: str) -> None:
    import resource

    memory = bytearray(100_000)

    def use(times: int) -> None:
        for number in range(times):
            node, peer = w.join()
            for _ in range(20):
                node.send(Push(number), [memory])
                message = w.message(peer)
                w.server.send(peer, Push(number), message.buffers)
                w.meanwhile(lambda: node.receive(lambda *_: [memory]))  # noqa: B023
            node.close()
            w.until(PeerDisconnected)
            w._stack.pop_all()  # else this world keeps the nodes that left, and what their TLS holds, to its end
            w.events.clear()

    with world(transport, place=lambda peer, header, lengths: [memory]) as w:
        use(10)
        gc.collect()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        use(30)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 3000


def test_invalid_frame_raises_and_leaves_the_connection_open() -> None:
    with world(limits=Limits(buffers=1)) as w:
        node, peer = w.join()
        with refused(InvalidValue):
            w.server.send(peer, Push(1), [b"", b""])
        echo(w, node, peer, 2)


def test_closed_server_says_goodbye_and_stops_listening() -> None:
    with world() as w:
        node, _ = w.join()
        w.server.close("the run is over")
        with pytest.raises(Exception, match="it said: the run is over"):
            node.receive()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((w.address.host, w.address.port))


def test_frame_taken_by_on_part_raises_no_event(transport: str, tmp_path: Path) -> None:
    memory, taken = bytearray(100), list[bytes]()

    def on_part(peer: int, header: Kinds, received: int, is_whole: bool) -> bool:
        taken.append(bytes(memory))
        return header != Push(2)

    with world(transport, tmp_path, place=lambda _, __, lengths: [memory][: len(lengths)], on_part=on_part) as w:
        node, peer = w.join()
        for number in range(4):
            w.meanwhile(partial(node.send, Push(number), [bytes([number]) * 100]))
        w.meanwhile(lambda: node.send(Hello("last")))
        assert w.message(peer).header == Push(2)
        assert w.message(peer).header == Hello("last")
        assert taken == [bytes([number]) * 100 for number in range(4)]


def test_admin_is_served_before_floods_of_other_roles(transport: str, tmp_path: Path) -> None:
    with world(transport, tmp_path) as w:
        flooders = [w.join(role="node") for _ in range(4)]
        admin, _ = w.join(role="admin")
        for node, _ in flooders:
            for number in range(300):
                node.send(Push(number), [])
        admin.send(Push(1), [])
        time.sleep(0.2)  # until all of it is here
        by_poll: list[list[FrameReceived[Kinds]]] = []
        while not by_poll or by_poll[-1]:
            by_poll.append([event for event in w.server.poll(0.1) if isinstance(event, FrameReceived)])
        numbers = {peer for _, peer in flooders}
        assert by_poll[0][0].peer not in numbers
        assert max(map(len, by_poll)) <= MAX_POLL_BYTES // 2**14 + MAX_TURN_FRAMES
        assert sum(map(len, by_poll)) == 4 * 300 + 1
        for _, peer in flooders:  # in their order, each one once
            frames = [event for polled in by_poll for event in polled if event.peer == peer]
            assert [event.header for event in frames] == [Push(number) for number in range(300)]
            assert all(sum(event.peer == peer for event in polled) <= MAX_TURN_FRAMES for polled in by_poll)
