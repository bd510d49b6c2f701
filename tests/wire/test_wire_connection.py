"""A node's connection over every transport: what is sent arrives, and every wait ends."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from evener.records.errors import InvalidValue
from evener.wire.connection import Connection, Peer
from evener.wire.errors import BadFrame, ConnectionLost
from evener.wire.frame import encode_frame
from evener.wire.limits import Limits
from evener.wire.server_events import PeerDisconnected
from evener.wire.transport import PlainTransport
from support.refusals import refused
from support.wire_peers import QUICK, SECURE, Hello, Kinds, Push, world

BIG = 30_000_000


def test_frames_arrive_complete_both_ways_over_every_transport(transport: str, tmp_path: Path) -> None:
    with world(transport, tmp_path) as w:
        node, peer = w.join()
        weights = np.random.default_rng(1).random((100, 300))
        for number in range(3):
            node.send(Push(number), [weights, b"", b"tail"])
            node.send(Hello("again"))
            message = w.message(peer)
            assert (message.header, [bytes(b) for b in message.buffers]) == (
                Push(number),
                [weights.tobytes(), b"", b"tail"],
            )
            assert w.message(peer).header == Hello("again")
            w.server.send(peer, Push(number + 10), [weights])
            frame = w.meanwhile(node.receive)
            assert (frame.header, bytes(frame.buffers[0])) == (Push(number + 10), weights.tobytes())


def test_large_frames_arrive_in_existing_memory(transport: str, tmp_path: Path) -> None:
    memory, told = bytearray(BIG), []
    sent = np.random.default_rng(2).bytes(BIG)

    def on_part(*args: Any) -> bool:
        told.append(args)
        return False

    with world(transport, tmp_path, place=lambda peer, header, lengths: [memory], on_part=on_part) as w:
        node, peer = w.join()
        w.meanwhile(lambda: node.send(Push(1), [sent]))
        assert w.message(peer).buffers[0].obj is memory
        assert memory == sent
        assert {args[:2] for args in told} == {(peer, Push(1))}
        counts = [count for _, _, count, _ in told]
        assert [is_whole for *_, is_whole in told] == [False] * (len(told) - 1) + [True]
        assert counts == sorted(set(counts))
        assert counts[-1] == BIG
        assert len(counts) > 10, "parts are told while the others are still to come"

        own = bytearray(BIG)
        w.server.send(peer, Push(2), [memory])
        frame = w.meanwhile(lambda: node.receive(lambda *_: [own]))
        assert frame.buffers[0].obj is own
        assert own == sent


def test_one_thread_sends_while_another_receives(transport: str, tmp_path: Path) -> None:
    with world(transport, tmp_path) as w:
        node, peer = w.join()
        payload = bytes(3_000_000)
        sending = [w.pool.submit(node.send, Push(i), [payload]) for i in range(10)]
        for i in range(10):
            w.server.send(peer, Push(i), [payload])
        frames = w.meanwhile(lambda: [node.receive() for _ in range(10)])
        assert [frame.header for frame in frames] == [Push(i) for i in range(10)]
        arrived = {w.message(peer).header for _ in range(10)}
        assert arrived == {Push(i) for i in range(10)}
        for each in sending:
            each.result(timeout=5)


def test_silent_master_is_lost_after_the_patience() -> None:
    with world() as w:
        node, _ = w.join(QUICK)
        began = time.monotonic()
        with refused(ConnectionLost):
            node.receive()
        assert 0.3 < time.monotonic() - began < 10  # joining has a patience of its own
        with refused(ConnectionLost):
            node.send(Hello("x"))


def test_master_that_reads_nothing_is_lost_after_the_patience(transport: str, tmp_path: Path) -> None:
    with world(transport, tmp_path) as w:
        node, _ = w.join(QUICK)  # and nobody polls the hub from here on
        with refused(ConnectionLost):
            node.send(Push(1), [bytes(BIG)])


def test_wait_tells_whether_a_frame_has_arrived(transport: str, tmp_path: Path) -> None:
    with world(transport, tmp_path) as w:
        node, peer = w.join()
        assert not node.wait(0)
        assert not node.wait(0.01)
        w.server.send(peer, Hello("a"))
        w.server.send(peer, Hello("b"))
        w.sent(peer)
        assert node.wait(1)
        assert node.receive().header == Hello("a")
        assert node.wait(0), "the second frame came along with the first"
        assert node.receive().header == Hello("b")
        assert not node.wait(0)


def test_goodbye_carries_its_reason_to_the_other_side(transport: str, tmp_path: Path) -> None:
    with world(transport, tmp_path) as w:
        node, peer = w.join()
        w.server.disconnect(peer, "the model has 8 parameters, yours 9")
        with refused(ConnectionLost):
            node.receive()
        assert w.until(PeerDisconnected) == PeerDisconnected(peer, "the model has 8 parameters, yours 9")
        node, peer = w.join()
        node.close("training is over")
        node.close("twice is once")
        assert w.until(PeerDisconnected) == PeerDisconnected(peer, "it said: training is over")
        with refused(ConnectionLost):
            node.receive()


def test_rejection_of_a_frame_reaches_its_sender_during_sending(transport: str, tmp_path: Path) -> None:
    def refuse(peer: int, header: Kinds, lengths: tuple[int, ...]) -> None:
        raise BadFrame(f"an update has 8 bytes, got {sum(lengths)}")

    with world(transport, tmp_path, place=refuse) as w:
        node, peer = w.join()

        def push() -> None:
            node.send(Push(1), [bytes(BIG)])
            node.receive()  # small buffers may have taken all of it before the refusal came

        with pytest.raises(ConnectionLost, match=f"it said: an update has 8 bytes, got {BIG}"):
            w.meanwhile(push)
        assert w.until(PeerDisconnected) == PeerDisconnected(peer, f"an update has 8 bytes, got {BIG}")


def test_cut_connection_differs_from_a_goodbye(transport: str, tmp_path: Path) -> None:
    with world(transport, tmp_path) as w:
        node, peer = w.join()
        w.server._peers[peer].transport.sock.shutdown(2)
        with refused(ConnectionLost):
            node.receive()
        assert w.until(PeerDisconnected).reason == "it closed without a reason"


def test_frame_that_a_node_rejects_is_reported_to_the_master() -> None:
    with world() as w:
        node, peer = w.join()
        node._reader._limits = Limits(frame_bytes=10)
        w.server.send(peer, Push(1), [bytes(11)])
        with refused(BadFrame):
            w.meanwhile(node.receive)
        assert w.until(PeerDisconnected).reason == "it said: a frame must have at most 10 bytes of payload, got 11"


def test_oversized_frame_is_rejected_before_it_is_sent() -> None:
    with world() as w:
        node, peer = w.join(Limits(buffers=1))
        with refused(InvalidValue):
            node.send(Push(1), [b"", b""])
        node.send(Push(2))
        assert w.message(peer).header == Push(2)


def test_closing_wakes_a_waiting_thread(transport: str, tmp_path: Path) -> None:
    with world(transport, tmp_path) as w:
        node, _ = w.join()
        waiting = w.pool.submit(node.receive)
        while not node._receiving.locked():
            time.sleep(0.001)
        node.close()
        with refused(ConnectionLost):
            waiting.result(timeout=2)


def test_byte_counts_agree_on_both_sides_with_little_overhead(transport: str, tmp_path: Path) -> None:
    with world(transport, tmp_path) as w:
        node, peer = w.join()
        framed = 0
        for number in range(10):
            framed += sum(map(len, encode_frame(number, Push(number), [bytes(101_800)], Limits())))
            node.send(Push(number), [bytes(101_800)])
            w.message(peer)
        w.server.send(peer, Push(1), [bytes(50)])
        w.meanwhile(node.receive)
        assert 0 < framed - 1_018_000 < 0.001 * 1_018_000
        ours, theirs = node._transport, w.server._peers[peer].transport
        assert ours.wire_bytes_sent == theirs.wire_bytes_received
        assert ours.wire_bytes_received == theirs.wire_bytes_sent
        on_wire = ours.wire_bytes_sent - framed
        assert on_wire == 80 if "tls" not in transport else 500 < on_wire < 5000


def test_no_plain_text_crosses_a_tls_connection() -> None:
    with world("tcp+tls") as w:
        node, peer = w.join()
        seen = bytearray()
        sock = w.server._peers[peer].transport.sock

        class Tap:
            def recv_into(self, view: memoryview) -> int:
                count: int = sock.recv_into(view)
                seen.extend(view[:count])
                return count

            def __getattr__(self, name: str) -> object:
                return getattr(sock, name)

        w.server._peers[peer].transport.sock = Tap()  # type: ignore[assignment]
        node.send(Hello("a secret name"), [b"secret payload" * 100])
        message = w.message(peer)
        w.server._peers[peer].transport.sock = sock
        assert bytes(message.buffers[0]) == b"secret payload" * 100
        assert len(seen) > 1400
        assert b"secret" not in seen
        assert SECURE.secret not in seen


@pytest.mark.parametrize(
    ("seen", "idle"),
    [
        ([(5.0, 0, True)], 5.0),
        ([(5.0, 0, False)], 0.0),
        ([(5.0, 1, True)], 0.0),
        ([(5.0, 1, True), (9.0, 1, True)], 4.0),
    ],
)
@pytest.mark.parametrize("direction", ["sent", "received"])
def test_peer_times_out_if_pending_data_does_not_move(
    seen: list[tuple[float, int, bool]], idle: float, direction: str
) -> None:
    def stalled(patience: float) -> str:
        transport = SimpleNamespace(wire_bytes_sent=0, wire_bytes_received=0, has_unsent=False, unacknowledged_bytes=0)
        reader = SimpleNamespace(midway=False)
        peer: Peer[Kinds] = Peer(0, cast(Any, transport), cast(Any, reader), Limits(patience=patience), 0.0)
        reason = ""
        for now, counter, expected in seen:
            setattr(transport, f"wire_bytes_{direction}", counter)
            setattr(*((transport, "has_unsent") if direction == "sent" else (reader, "midway")), expected)
            reason = peer.stalled(now)
        return reason

    assert stalled(idle + 0.1) == ""
    words = {"sent": "it received nothing for", "received": "it stopped within a frame for"}
    assert idle == 0 or stalled(idle - 0.1).startswith(words[direction])


@pytest.mark.posix
def test_slow_connection_stays_open_while_data_are_acknowledged() -> None:
    """The system takes more only when a third of its buffer is free, which here takes longer than the patience."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sock = socket.create_connection(listener.getsockname())
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 400_000)
        far, _ = listener.accept()
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64_000)
        connection: Connection[Kinds] = Connection(PlainTransport(sock), Kinds, Limits(patience=0.4), "far away")
        received = 0

        def read_slowly() -> None:
            nonlocal received
            while count := len(far.recv(10_000)):
                received += count
                time.sleep(0.02)

        reading = threading.Thread(target=read_slowly)
        reading.start()
        began = time.monotonic()
        connection.send(Push(1), [bytes(1_200_000)])
        assert time.monotonic() - began > 0.5
        connection.close()
        reading.join()
        far.close()
    assert received > 1_200_000


def test_peer_is_delivering_while_data_are_acknowledged() -> None:
    transport, seen = SimpleNamespace(has_unsent=False), list[bool]()
    peer: Peer[Kinds] = Peer(1, cast(Any, transport), cast(Any, None), Limits(), 0.0)
    for sent, under_way in (
        (0, 0),
        (100, 100),
        (600_000, 500_000),
        (600_000, 400_000),
        (600_000, 400_000),
        (600_000, 0),
    ):
        transport.wire_bytes_sent, transport.unacknowledged_bytes = sent, under_way
        seen.append(peer.is_delivering())
    assert seen == [False, False, True, True, False, False]  # heartbeats alone say nothing, nor does a line that stands
