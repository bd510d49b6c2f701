"""A round's contributions are merged while they arrive; who is lost on the way, or begins anew, leaves no trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from evener.agreements.layout import Flat
from evener.agreements.messages import Push
from evener.agreements.settings import AgreementSettings, Sgd
from support.server_inboxes import LAYOUT, Desk

AGREEMENT = AgreementSettings(batch=30, outer=Sgd(learning_rate=1.0))
HALF = LAYOUT.num_bytes - 16
Array = NDArray[Any]


@pytest.fixture(autouse=True)
def _even_the_tiniest_state_is_merged_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener.agreements.aggregator.BLOCK_BYTES", 0)


class Sender:
    """Contributions of several workers on their way, byte by byte."""

    def __init__(self, names: str, seed: int = 0) -> None:
        self.desk = Desk(AGREEMENT, quorum=len(names))
        self.desk.admit(*names)
        draw = np.random.default_rng(seed)
        self.values: dict[str, Array] = {name: draw.standard_normal(4) for name in names}
        self.inboxes: dict[str, memoryview] = {}

    def begin(self, name: str) -> None:
        inbox = self.desk.server.inbox(name, self.desk.leases[name][0].number)
        assert inbox is not None
        self.inboxes[name] = inbox

    def send(self, name: str, start: int, stop: int) -> None:
        change = Flat(LAYOUT)
        change.parameters[0][:] = self.values[name]
        self.inboxes[name][start:stop] = change.memory.data[start:stop]
        self.desk.server.arrived(name, self.desk.leases[name][0].number, stop)

    def finish(self, name: str) -> None:
        self.inboxes.pop(name)
        push = Push(number=self.desk.leases[name].pop(0).number, seconds=1.0)
        self.desk.heed(self.desk.server.push(name, push, LAYOUT.num_bytes))

    def weights(self) -> Array:
        return self.desk.server.weights.parameters[0]

    def send_all(self, names: str, start: int = 0, stop: int = LAYOUT.num_bytes) -> None:
        for name in names:
            if name not in self.inboxes:
                self.begin(name)
            self.send(name, start, stop)


def at_once(names: str, lost: str = "") -> Array:
    """The weights without any merging on the way."""
    sender = Sender(names)
    for name in lost:
        sender.desk.dismiss(name)
    for name in names:
        if name not in lost:
            sender.begin(name)
            change = Flat(LAYOUT)
            change.parameters[0][:] = sender.values[name]
            sender.inboxes[name][:] = change.memory.data
            sender.finish(name)
    return sender.weights().copy()


def test_arrived_parts_of_all_contributions_are_merged_at_once() -> None:
    sender = Sender("abc")
    sender.send_all("abc")
    for inbox in sender.inboxes.values():
        inbox[:] = bytes(len(inbox))  # too late to matter
    for name in "abc":
        sender.finish(name)
    np.testing.assert_array_equal(sender.weights(), at_once("abc"))


def test_arrival_order_of_parts_changes_no_bit() -> None:
    sender = Sender("abc")
    sender.send_all("cab", 0, HALF)
    sender.send("b", HALF, LAYOUT.num_bytes)
    sender.finish("b")
    sender.send_all("ca", HALF)
    sender.finish("c")
    sender.finish("a")
    np.testing.assert_array_equal(sender.weights(), at_once("abc"))


@pytest.mark.parametrize("lost", ["a", "b", "ab"])
def test_worker_lost_during_its_transfer_leaves_no_trace(lost: str) -> None:
    sender = Sender("abcd")
    sender.send_all("abcd", 0, HALF)
    for name in lost:
        sender.inboxes.pop(name)
        sender.desk.dismiss(name)
    staying = "".join(name for name in "abcd" if name not in lost)
    sender.send_all(staying, HALF)
    for name in staying:
        sender.finish(name)
    np.testing.assert_array_equal(sender.weights(), at_once("abcd", lost))


def test_restarted_transfer_with_other_values_is_merged_again() -> None:
    sender = Sender("ab")
    expected = at_once("ab")
    truth = sender.values["a"].copy()
    sender.values["a"] = truth + 5
    sender.send_all("ab")
    sender.values["a"] = truth
    sender.begin("a")
    sender.send("a", 0, LAYOUT.num_bytes)
    sender.finish("a")
    sender.finish("b")
    np.testing.assert_array_equal(sender.weights(), expected)


def test_old_connection_cannot_write_into_the_new_buffer() -> None:
    sender = Sender("ab")
    sender.begin("a")
    old = sender.inboxes["a"]
    sender.begin("a")
    sender.send_all("ab")
    old[:] = b"\xff" * len(old)
    for name in "ab":
        sender.finish(name)
    np.testing.assert_array_equal(sender.weights(), at_once("ab"))


def test_non_finite_contribution_is_dropped_after_partial_merging() -> None:
    sender = Sender("abc")
    sender.values["b"][1] = np.nan
    sender.send_all("abc")
    for name in "abc":
        sender.finish(name)
    np.testing.assert_allclose(sender.weights(), -(sender.values["a"] + sender.values["c"]) / 2)
    assert sender.desk.server.workers["b"].totals.refused == 1
