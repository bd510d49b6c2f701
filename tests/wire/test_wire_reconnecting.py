"""A broken connection is made anew, patiently and not for ever; what was in flight is told."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_peers import Hello, Kinds, Push, World, world

from evener.wire import (
    Address,
    Closed,
    Connection,
    Hub,
    NotDelivered,
    NothingListens,
    Opened,
    Reconnecting,
    WrongSecret,
    connect,
    make_identity,
)
from evener.wire.reconnecting import pauses


@settings(deadline=None)
@given(st.integers(0, 2**32), st.floats(0.01, 1), st.floats(1, 60))
def test_pauses_double_up_to_the_longest_and_are_spread(seed: int, first: float, longest: float) -> None:
    drawn = list(itertools.islice(pauses(Random(seed), first, longest), 20))
    for number, pause in enumerate(drawn):
        whole = min(first * 2**number, longest)
        assert whole / 2 <= pause <= whole


def test_two_nodes_do_not_knock_at_the_same_moments() -> None:
    assert list(itertools.islice(pauses(Random(1)), 9)) != list(itertools.islice(pauses(Random(2)), 9))


def line(w: World, give_up_seconds: float = 10, slept: list[float] | None = None) -> Reconnecting[Kinds]:
    """A reconnecting line to the hub, whose pauses are written down and cut short."""

    def dial(seconds: float) -> Connection[Kinds]:
        return connect(w.address, w.identity.token, Kinds, w.limits, seconds=seconds)

    def sleep(seconds: float) -> None:
        if slept is not None:
            slept.append(seconds)

    return w.meanwhile(lambda: Reconnecting(dial, Random(1), give_up_seconds, sleep))


def test_what_was_in_flight_is_told_and_can_be_sent_anew(transport: str, tmp_path: Path) -> None:
    with world(transport, tmp_path) as w, line(w) as node:
        peer = w.until(Opened).peer
        node.send(Push(1), [b"abc"])
        w.message(peer)
        w.hub.disconnect(peer, "you were late")

        with pytest.raises(
            NotDelivered,
            match=r"it said: you were late; it stands again after 1 try, what was in flight has to be sent",
        ):
            w.meanwhile(node.receive)
        assert w.until(Closed).peer == peer
        again = w.until(Opened).peer
        assert again != peer
        node.send(Push(1), [b"abc"])
        assert bytes(w.message(again).buffers[0]) == b"abc"
        w.hub.send(again, Hello("thanks"))
        assert node.wait(1)
        assert w.meanwhile(node.receive).header == Hello("thanks")
        assert node.traffic.sent["Push"].frames == 2
        node.close("done")
        assert w.until(Closed).reason == "it said: done"


def test_a_master_that_is_killed_and_restarted_gets_its_nodes_back(transport: str, tmp_path: Path) -> None:
    with world(transport, tmp_path) as w:
        slept: list[float] = []
        node = line(w, slept=slept)
        w.until(Opened)
        for link in w.hub._links.values():
            link.channel.sock.shutdown(2)  # as a kill does: no goodbye
        w.hub.close()
        restarted: list[Hub[Kinds]] = []

        def restart_after_three_tries(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 3:
                hub: Hub[Kinds] = Hub(Kinds, w.identity)
                hub.listen(w.address)
                w.hub = hub
                restarted.append(hub)  # last: the test's own thread goes on from here

        node._sleep = restart_after_three_tries
        receiving = w.pool.submit(node.receive)
        while not restarted:
            assert not receiving.done()
        with pytest.raises(NotDelivered, match="it stands again after 4 tries"):
            w.meanwhile(receiving.result)
        assert slept[0] < slept[1] < slept[2]
        w.until(Opened)
        node.close()


def test_it_is_not_tried_for_ever() -> None:
    slept: list[float] = []
    with world() as w:
        node = line(w, give_up_seconds=0.0, slept=slept)
        w.hub.close()
        w.hub = Hub(Kinds, w.identity)
        with pytest.raises(NothingListens, match="start `evener up` on it"):
            node.receive()
        assert slept == []
        with pytest.raises(NothingListens):
            node.send(Push(1))


def test_what_trying_again_cannot_cure_is_told_at_once() -> None:
    slept: list[float] = []
    with world() as w:
        node = line(w, slept=slept)
        w.hub.close()
        w.hub = Hub(Kinds, make_identity(insecure=True))
        w.hub.listen(w.address)
        with pytest.raises(WrongSecret, match="copy the token"):
            w.meanwhile(node.receive)
        assert slept == []


def test_the_first_connection_is_made_at_once_or_not_at_all() -> None:
    slept: list[float] = []
    address = Address("127.0.0.1", 1)
    with pytest.raises(NothingListens):
        Reconnecting(
            lambda seconds: connect(address, make_identity(insecure=True).token, Kinds, seconds=seconds),
            Random(1),
            give_up_seconds=10,
            sleep=slept.append,
        )
    assert slept == []


@pytest.mark.parametrize("sender", ["node", "master"])
def test_a_connection_ends_before_its_keys_protect_too_much_and_the_next_one_has_new_ones(
    monkeypatch: pytest.MonkeyPatch, sender: str
) -> None:
    monkeypatch.setattr("evener.wire.tls.KEY_BYTES", 1_000_000)
    with world("tcp+tls") as w, line(w) as node:
        peer, payload = w.until(Opened).peer, [bytes(90_000)]

        def exchange(times: int) -> None:
            for _ in range(times):
                if sender == "node":
                    w.meanwhile(lambda: node.send(Push(1), payload))
                    w.message(peer)
                else:
                    w.hub.send(peer, Push(1), payload)
                    w.meanwhile(node.receive)

        exchange(10)
        with pytest.raises(NotDelivered, match="keys have protected 1000000 bytes, which is enough"):
            exchange(3)
        w.until(Closed, where=lambda event: event.peer == peer)
        peer = w.until(Opened).peer
        exchange(10)
