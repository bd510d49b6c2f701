"""What nodes say of themselves: two compute a slice, a third decides; beats count as far as there is work."""

from __future__ import annotations

import threading
import time
from random import Random
from typing import Any

import numpy as np
import pytest

from evener.agreements.settings import Sgd, synchronous
from evener.ps.master import lease_training
from evener.ps.master.validation import CrossCheck, EpochEnd, SliceAnswer, Validations
from evener.ps.protocol import messages as m
from evener.ps.protocol.messages import Validated, ValidationSlice
from evener.wire.errors import ConnectionLost
from support.agreements import SYNC
from support.linear_engine import RATE, SAMPLES, TRUTH, VALIDATION, Mood, costs, data, job, serial, weights
from support.master_in_threads import plane, unpack, wait_until
from support.strangers import joined, play, stranger

THREE = costs({"a": 1.0, "b": 1.0, "c": 1.0})


def said(loss: float | None, correct: float) -> SliceAnswer:
    return SliceAnswer(loss, correct)


@pytest.mark.parametrize(
    ("one", "other", "agree"),
    [
        (said(10.0, 50), said(10.0, 50), True),
        (said(10.0, 50), said(10.4, 51), True),
        (said(10.0, 50), said(10.0, 53), False),
        (said(10.0, 500), said(18.0, 500), False),
        (said(None, 50), said(None, 50), True),
        (said(None, 50), said(10.0, 50), False),
    ],
)
def test_answers_agree_within_the_differences_of_devices(one: SliceAnswer, other: SliceAnswer, agree: bool) -> None:
    assert one.agrees_with(other, 100) is agree
    assert other.agrees_with(one, 100) is agree


def test_third_node_decides_between_two_that_disagree() -> None:
    check = CrossCheck(100)
    check.answers = {"a": said(10.0, 50), "b": said(0.0, 100)}
    assert (check.truth, check.faulty_nodes(), check.next_of(["a", "b", "c"])) == (None, [], "c")
    check.answers["c"] = said(10.1, 50)
    assert (check.truth, check.faulty_nodes()) == (said(10.0, 50), ["b"])


def validations() -> Validations:
    found = Validations(job(SYNC), lambda count: 0)  # the first slice, of a, by the first of the others, b
    found.add(EpochEnd(0, 5, weights()))
    return found


def answer(number: int, correct: float) -> Validated:
    return Validated(run="linear-1", number=number, loss=7.0, correct=correct)


def test_validation_waits_for_the_check_and_counts_the_majority() -> None:
    one = validations()
    slices = one.give_out(THREE, 0.0)
    assert [(one.name, one.header.slices) for one in slices] == [  # b gets the weights once
        ("a", (ValidationSlice(0, 0, 7),)),
        ("b", (ValidationSlice(1, 7, 7), ValidationSlice(3, 0, 7))),
        ("c", (ValidationSlice(2, 14, 7),)),
    ]
    for name, number, correct in (("a", 0, 7.0), ("b", 1, 2.0), ("c", 2, 2.0)):
        assert one.answer(answer(number, correct), 1.0) == (True, None)
        assert one.compare(name, answer(number, correct), list(THREE)) == []
    assert one.answer(answer(3, 3.0), 1.0) == (False, None)
    (third,) = one.compare("b", answer(3, 3.0), list(THREE))
    (part,) = third.header.slices
    assert (third.name, part.first, part.size) == ("c", 0, 7)
    assert one.finished(1.0) is None
    one.compare("c", answer(part.number, 3.0), list(THREE))
    (liar,) = one.faulty
    assert liar[0] == "a"
    found = one.finished(2.0)
    assert found is not None
    assert found.accuracy == (3 + 2 + 2) / 21


def test_validation_does_not_wait_for_the_check_of_a_departed_node() -> None:
    one = validations()
    one.give_out(THREE, 0.0)
    for name, number in (("a", 0), ("b", 1), ("c", 2)):
        one.answer(answer(number, 1.0), 1.0)
        one.compare(name, answer(number, 1.0), list(THREE))
    assert one.finished(1.0) is None
    one.give_out(costs({"a": 1.0, "c": 1.0}), 1.0)
    assert one.finished(1.0) is not None


def test_unrequested_check_answer_is_ignored() -> None:
    one = validations()
    one.give_out(THREE, 0.0)
    one.answer(answer(0, 3.0), 1.0)
    one.compare("a", answer(0, 3.0), list(THREE))
    assert one.compare("c", answer(3, 7.0), list(THREE)) == []
    one.compare("b", answer(3, 3.0), list(THREE))
    assert one.faulty == []


def test_faulty_validator_is_expelled_and_the_accuracy_is_correct() -> None:
    with plane("a", "b", "c", patience=5) as ps:
        liar = ps.join("liar", Mood(lies=True))
        record, found = ps.run(job(SYNC, epochs=80), weights())
        liar.thread.join(10)
        assert "it was expelled: it counted" in str(liar.error)
        again = ps.join("liar", Mood(lies=True))
        again.thread.join(10)
        assert "it was expelled" in str(again.error)
    assert float(np.abs(found["w"] - TRUTH).max()) < 0.2
    (expelled,) = [event for event in record.events if event.kind == "expelled"]
    assert "node liar: it counted" in expelled.message
    assert expelled.step <= 20 * 5
    assert record.validations[-1].accuracy == accuracy(found)


def test_faulty_node_is_expelled_and_the_others_match_three_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease_training, "SystemRandom", lambda: Random(1))  # who is checked in which round
    whole = synchronous(batch=SAMPLES, outer=Sgd(learning_rate=4 * RATE))  # every round is validated
    with plane("a", "b", "c") as ps:
        _, three = ps.run(job(whole, epochs=100), weights())
        liar = ps.join("liar", Mood(unit_seconds=2e-5, seconds=0.0, rubbish=True, lies=True))
        record, found = ps.run(job(whole, run="linear-2", epochs=100), weights())
        liar.thread.join(10)
        assert "it was expelled: it counted" in str(liar.error)
    (expelled,) = [event for event in record.events if event.kind == "expelled"]
    assert expelled.nodes == ("liar",)
    assert expelled.step <= 10
    assert abs(accuracy(found) - accuracy(three)) <= 0.02
    assert record.validations[-1].accuracy == accuracy(found)


def test_node_with_flipped_gradients_is_expelled_and_the_rest_learn() -> None:
    with plane("a", "b", "c", patience=5) as ps:
        evil = ps.join("evil", mood := Mood(factor=-10.0))
        record, found = ps.run(job(SYNC, epochs=80), weights())
        evil.thread.join(10)
        assert "it was expelled" in str(evil.error)
    (expelled,) = [event for event in record.events if event.kind == "expelled"]
    assert "node evil: the contribution is far longer than usual" in expelled.message
    assert mood.calls <= 10  # rounds in which it took part
    assert abs(accuracy(found) - accuracy(serial(80))) <= 0.02  # three honest nodes are equal to one process
    assert record.validations[-1].accuracy == accuracy(found)


def accuracy(found: dict[str, Any]) -> float:
    """What the weights truly reach."""
    inputs, targets = data(VALIDATION, 2)
    return float((abs(inputs @ found["w"] + found["b"][0] - targets) < 0.5).mean())


def test_healthy_nodes_are_never_expelled() -> None:
    with plane("a", "b", "c") as ps:
        record, _ = ps.run(job(SYNC, epochs=40), weights())
    assert not [event for event in record.events if event.kind == "expelled"]


def test_heartbeats_without_work_do_not_block_the_run() -> None:
    with plane("honest", patience=0.6) as ps, stranger(ps) as evil, ps.control() as control:
        joined(evil)
        wait_until(lambda: "evil" in ps.master.nodes.by_name)
        control.submit(job(SYNC, epochs=4), weights(), [])
        play(evil)
        ending = threading.Event()

        def beat() -> None:
            steps = 0
            while not ending.wait(0.05):
                try:
                    evil.send(m.Heartbeat(steps=(steps := steps + 1)))
                except ConnectionLost:
                    return

        beating = threading.Thread(target=beat)
        beating.start()
        began = time.monotonic()
        result: Any = control.watch("linear-1", lambda _: None, lambda: None)
        ending.set()
        beating.join()
    record, _ = unpack(result)
    assert time.monotonic() - began < 20
    assert sum(step.samples for step in record.steps) == 4 * SAMPLES
    assert any("evil" in event.message for event in record.events if event.kind == "excluded")
