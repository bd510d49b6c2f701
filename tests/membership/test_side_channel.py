"""What two ranks do besides what all do: over a connection of their own, which ends with its generation."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from evener.comm.mesh import Mesh
from evener.comm.mesh_joining import join_mesh
from evener.membership.side_channel import SideChannel
from evener.records.errors import NodeLost
from support.refusals import refused
from support.stores import memory_store


def pair() -> list[partial[Mesh]]:
    """How either of two ranks joins the other."""
    store = memory_store()
    return [
        partial(
            join_mesh, rank=rank, nodes=["a", "b"], store=store, address="127.0.0.1", patience=10.0, longest_wait=10.0
        )
        for rank in range(2)
    ]


def give(mesh: Mesh, channel: SideChannel) -> None:
    """Send what the main thread says."""
    while (message := channel.inbox.get()) is not None:
        mesh.send_to(1, message)


def test_message_of_one_main_thread_reaches_the_other() -> None:
    joins, heard = pair(), list[bytes]()

    def take(mesh: Mesh, channel: SideChannel) -> None:
        while True:
            message = mesh.receive_from(0)
            with channel.changed:
                heard.append(message)
                channel.changed.notify_all()

    giver, taker = SideChannel(joins[0], give), SideChannel(joins[1], take)
    for message in (b"one", b"two"):
        giver.inbox.put(message)
    taker.wait_for(lambda: len(heard) == 2)
    assert heard == [b"one", b"two"]
    giver.inbox.put(None)
    with refused(NodeLost):
        taker.wait_for(lambda: len(heard) == 3)
    assert giver.error is None


def test_error_in_the_thread_is_raised_by_the_waiting_caller() -> None:
    joins = pair()

    def fail(_mesh: Mesh, _channel: SideChannel) -> None:
        raise ValueError("of no kind that anybody knows")

    giver, taker = SideChannel(joins[0], give), SideChannel(joins[1], fail)
    with pytest.raises(ValueError, match="of no kind that anybody knows"):
        taker.wait_for(lambda: False)
    giver.abort(NodeLost("the generation is over"))


def test_abort_wakes_a_waiting_caller_even_before_the_connection() -> None:
    joins = pair()
    alone = SideChannel(joins[1], give)
    threading.Timer(0.1, partial(alone.abort, NodeLost("a is gone"))).start()
    with refused(NodeLost):
        alone.wait_for(lambda: False)
    met = SideChannel(joins[0], give)  # the thread that was left ends with it
    met.abort(NodeLost("a is gone"))
