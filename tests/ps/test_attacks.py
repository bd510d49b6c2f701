"""Attacks of somebody who holds the token, against a real master: each costs its author the connection, and no more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from evener.agreements.messages import Push
from evener.ps.client import MasterClient
from evener.ps.protocol import messages as m
from evener.ps.protocol.job import encode_job
from evener.records.errors import EvenerError
from evener.records.profile import DeviceProfile
from evener.wire.connection import Connection
from evener.wire.errors import ConnectionLost
from evener.wire.frame import encode_head
from support.agreements import SYNC, distance
from support.linear_engine import job, serial, weights
from support.master_in_threads import Plane, plane, unpack, wait_until
from support.strangers import (
    introduction,
    joined,
    log_of,
    next_told,
    play,
    refusals,
    stranger,
    told_until_closed,
    welcomed,
)

Attack = Callable[[Connection[m.Header]], None]


def send_after_joining(*headers: m.Header) -> Attack:
    def attack(connection: Connection[m.Header]) -> None:
        welcomed(connection)
        for header in headers:
            connection.send(header)

    return attack


def submit(**fields: Any) -> Attack:
    return lambda connection: connection.send(
        m.SubmitRun(), [encode_job(replace_unchecked(job(SYNC), **fields)), weights().memory]
    )


class Unchecked(msgspec.Struct, kw_only=True):
    """A job whose fields are anything."""

    run: Any
    task: Any
    title: Any
    code: Any
    data: Any
    data_dir: Any
    options: Any
    precision: Any
    agreement_name: Any
    agreement: Any
    workload: Any
    layout: Any
    fixed_sum: Any
    num_validation: Any
    has_accuracy: Any
    submitter: Any
    reads_early: Any
    nodes: Any


def replace_unchecked(one: Any, **fields: Any) -> Any:
    return Unchecked(**{**{name: getattr(one, name) for name in one.__struct_fields__}, **fields})


def profile(**fields: Any) -> Any:
    plain = msgspec.to_builtins(
        DeviceProfile(node="evil", device="cpu", model="", cores=1, memory_bytes=1, usable_memory_bytes=1)
    )
    return {**plain, **fields}


def unchecked_push(seconds: float) -> Any:
    push = Push(number=1, seconds=1.0)
    msgspec.structs.force_setattr(push, "seconds", seconds)
    return push


REFUSED: dict[str, Attack] = {
    "negative incarnation": lambda connection: joined(connection, incarnation=-1),
    "clock that is no number": lambda connection: joined(connection, clock=float("nan")),
    "clock of forever": lambda connection: joined(connection, clock=float("inf")),
    "control characters in a version": lambda connection: joined(connection, torch="\x1b]0;forged\x07"),
    "device that turns the direction": lambda connection: joined(connection, device="cpu\u202egpj.exe"),
    "run that is a path": lambda connection: joined(connection, run="../../etc"),
    "profile of endless speed": lambda connection: joined(connection, profile=profile(pass_seconds=float("inf"))),
    "profile of more cores than a number has": lambda connection: joined(connection, profile=profile(cores=2**64 - 1)),
    "watching a run with NUL in its name": lambda connection: connection.send(m.WatchRun(run="a\0b")),
    "watching an absolute path": lambda connection: connection.send(m.WatchRun(run="/etc")),
    "stopping a run of 300 characters": lambda connection: connection.send(m.StopRun(run="x" * 300)),
    "fetching no hash": lambda connection: connection.send(m.FetchBlob(digest="zz", offset=0)),
    "fetching from before the beginning": lambda connection: connection.send(m.FetchBlob(digest="0" * 64, offset=-1)),
    "seconds of almost nothing": send_after_joining(m.Ready(run="linear-1", unit_seconds=5e-324)),
    "seconds that are no number": send_after_joining(m.Ready(run="linear-1", unit_seconds=float("nan"))),
    "reason with control characters": send_after_joining(m.NotReady(run="linear-1", reason="\x1b[2J")),
    "reason without end": send_after_joining(m.NotReady(run="linear-1", reason="x" * 60_000)),
    "negative memory": send_after_joining(m.Heartbeat(peak_memory_bytes=-1)),
    "more steps than a number has": send_after_joining(m.Heartbeat(steps=2**64 - 1)),
    "right answers that are no number": send_after_joining(
        m.Validated(run="linear-1", number=0, loss=0.0, correct=float("nan"))
    ),
    "contribution of NaN seconds": send_after_joining(
        m.Contribution(run="linear-1", push=unchecked_push(float("nan")))
    ),
    "contribution of negative seconds": send_after_joining(m.Contribution(run="linear-1", push=unchecked_push(-1.0))),
    "contribution of endless loss": send_after_joining(
        m.Contribution(run="linear-1", push=Push(number=1, seconds=1.0, loss=1e308))
    ),
    "a second profile": send_after_joining(m.Profiled(profile=introduction("evil", profiled=True).profile)),  # type: ignore[arg-type]
    "a job of more bytes than any": lambda connection: connection.send(m.SubmitRun(), [bytes(17 * 2**20), b""]),
    "a run in three buffers": lambda connection: connection.send(m.SubmitRun(), [b"", b"", b""]),
    "a run of 16 GiB": lambda connection: announce(connection, m.SubmitRun(), (9, 16 * 2**30 - 9)),
    "a piece of a blob in many buffers": lambda connection: connection.send(
        m.BlobChunk(digest="0" * 64, offset=0, total=1), [b"1"] * 1000
    ),
    "a header that is text and no text": lambda connection: raw(connection, b"\x92\xa8WatchRun\xa2\xff\xfe"),
    "a header nested without end": lambda connection: raw(connection, b"\x91" * 60_000),
}
"""What closes the connection of whoever does it."""

REJECTED: dict[str, tuple[Attack, str]] = {
    "code that is no hash": (submit(code="zz"), "cannot be understood"),
    "run of 300 characters": (submit(run="x" * 300), "cannot be understood"),
    "run above": (submit(run="../../x"), "cannot be understood"),
    "run of control characters": (submit(run="a\x1b[2Jb"), "cannot be understood"),
    "title of control characters": (submit(title="a\x1b[2Jb"), "cannot be understood"),
    "bad UTF-8": (
        lambda connection: connection.send(m.SubmitRun(), [b"\x81\xa3run\xa2\xff\xfe", weights().memory]),
        "cannot be understood",
    ),
    "nested without end": (
        lambda connection: connection.send(m.SubmitRun(), [b"\x81\xa3run" + b"\x91" * 100_000, weights().memory]),
        "cannot be understood",
    ),
    "samples beyond numbers": (
        submit(workload={"num_samples": 2**63, "num_epochs": 1}),
        "cannot be understood",
    ),
    "rates without end": (
        submit(agreement={"batch": 1, "outer": {"type": "sgd", "learning_rate": float("inf")}}),
        "cannot be understood",
    ),
    "an array with a name that no file takes": (
        submit(layout={"entries": [{"name": "__metadata__", "shape": (6,), "dtype": "float64", "kind": "parameter"}]}),
        "cannot be understood",
    ),
    "an array with a name of the master's": (
        submit(
            layout={"entries": [{"name": "evener.outer/x", "shape": (6,), "dtype": "float64", "kind": "parameter"}]}
        ),
        "cannot be understood",
    ),
    "an array of many dimensions": (
        submit(layout={"entries": [{"name": "w", "shape": (1,) * 80, "dtype": "float64", "kind": "parameter"}]}),
        "cannot be understood",
    ),
    "an array of no size and all sizes": (
        submit(layout={"entries": [{"name": "w", "shape": (0, 2**62), "dtype": "float64", "kind": "parameter"}]}),
        "cannot be understood",
    ),
}
"""What is answered by a refusal."""


def announce(connection: Connection[m.Header], header: m.Header, lengths: tuple[int, ...]) -> None:
    """The head of a frame, without what it promises."""
    head = encode_head(connection._sequence, msgspec.msgpack.encode(header), lengths)
    connection._transport.send([memoryview(head)])


def raw(connection: Connection[m.Header], header: bytes) -> None:
    """A frame with these bytes as its header."""
    connection._transport.send([memoryview(encode_head(connection._sequence, header))])


def test_every_attack_is_logged_and_an_honest_run_stays_exact() -> None:
    with plane("honest", patience=1) as ps:
        ps.nodes[0].mood.seconds = 0.002
        results: list[Any] = []
        running = threading.Thread(target=lambda: results.append(ps.watch(job(SYNC, epochs=40), weights())))
        running.start()
        wait_until(lambda: ps.version() > 0)
        for name, attack in REFUSED.items():
            before = len(refusals(ps))
            with stranger(ps) as connection:
                try:
                    attack(connection)
                except ConnectionLost:
                    pass  # closed while it was still sending
                else:
                    told_until_closed(connection, name)
            wait_until(lambda before=before: len(refusals(ps)) > before, f"that {name} is logged")  # type: ignore[misc]
            line = refusals(ps)[-1]
            assert line["time"]
            assert line["address"]
        running.join()
    record, found = unpack(results[0][0])
    assert distance(found, serial(40)) < 1e-12
    assert record.nodes[0].name == "honest"


@pytest.mark.parametrize("name", REJECTED)
def test_invalid_submission_is_rejected_in_one_sentence(name: str) -> None:
    attack, sentence = REJECTED[name]
    with plane() as ps, stranger_that_watches(ps) as connection:
        attack(connection)
        while not isinstance(header := connection.receive().header, m.RunRejected):
            pass
        assert sentence in header.reason
        assert "\n" not in header.reason
        assert ps.ask().run is None


def stranger_that_watches(ps: Plane) -> Connection[Any]:
    return MasterClient(ps.address, ps.identity.token, ps.patience)._connection


def test_internal_error_of_the_master_is_logged_with_its_traceback(monkeypatch: Any) -> None:
    from evener.ps.master.scheduler import Scheduler

    def broken(*_: Any) -> None:
        raise MemoryError("nothing left")

    with plane("a") as ps:
        monkeypatch.setattr(Scheduler, "watch", broken)
        with stranger(ps) as connection:
            connection.send(m.WatchRun(run="any"))
            told_until_closed(connection)
        monkeypatch.undo()
        (line,) = wait_until(lambda: [line for line in log_of(ps) if line["what"] == "fault"])
        assert "MemoryError: nothing left" in line["detail"]
        assert "Traceback" in line["detail"]
        assert any("MemoryError: nothing left" in sentence for sentence in ps.said)
        ps.run(job(SYNC), weights())


def test_error_while_receiving_costs_only_that_peer(monkeypatch: Any) -> None:
    from evener.ps.master.lease_training import LeaseTraining

    with plane("a", patience=1) as ps:
        ps.nodes[0].mood.seconds = 0.01
        results: list[Any] = []
        running = threading.Thread(target=lambda: results.append(ps.watch(job(SYNC, epochs=30), weights())))
        running.start()
        wait_until(lambda: ps.version() > 0)
        inbox = LeaseTraining.inbox

        def broken(run: LeaseTraining, node: Any, header: Any, length: int) -> Any:
            if node.name == "evil":
                raise OSError(28, "No space left on device")
            return inbox(run, node, header, length)

        monkeypatch.setattr(LeaseTraining, "inbox", broken)
        with stranger(ps) as connection:
            welcomed(connection)
            connection.send(m.Contribution(run="linear-1", push=Push(number=1, seconds=1.0)), [bytes(48)])
            told_until_closed(connection)
        running.join()
        (line,) = [line for line in log_of(ps) if line["what"] == "fault"]
    assert (line["name"], "No space left" in line["detail"]) == ("evil", True)
    assert distance(unpack(results[0][0])[1], serial(30)) < 1e-12


@pytest.mark.parametrize("where", ["tick", "end"])
def test_run_that_cannot_continue_is_set_aside_before_the_next(where: str, monkeypatch: Any) -> None:
    from evener.ps.master import lease_run
    from evener.ps.master.lease_training import LeaseTraining

    def broken(*_: Any) -> None:
        raise ArithmeticError("the books do not balance")

    with plane("a") as ps:
        if where == "tick":
            monkeypatch.setattr(LeaseTraining, "tick", broken)
        else:
            monkeypatch.setattr(lease_run, "weights_of", broken)
        result, _ = ps.watch(job(SYNC), weights())
        assert type(result.error) is EvenerError
        assert "run linear-1 cannot be continued (ArithmeticError: the books do not balance)" in result.reason
        monkeypatch.undo()
        wait_until(lambda: any("cannot be continued" in sentence for sentence in ps.said))
        _, found = ps.run(job(SYNC, run="linear-2"), weights())
    assert distance(found, serial(4)) < 1e-12


def test_contribution_sent_before_its_lease_is_rejected() -> None:
    """Else what is merged is whatever lay in that memory: perhaps another node's gradient of earlier."""
    with plane("a", patience=1) as ps:
        ps.nodes[0].mood.gate.clear()
        with stranger(ps) as evil, ps.control() as control:
            joined(evil)
            control.submit(job(SYNC, epochs=2), weights(), [])
            lease = play(evil)
            evil.send(m.Contribution(run="linear-1", push=Push(number=lease.number, seconds=0.01)), [bytes(48)])
            guess = lease.number + 2  # of the next round: each of both gets one
            early = m.Contribution(run="linear-1", push=Push(number=guess, seconds=0.01))
            announce(evil, early, (48,))
            evil._sequence += 1
            for _ in range(2):  # then the master has read what was announced
                control.ask()
            ps.nodes[0].mood.gate.set()
            told = next_told(evil)
            assert told.answer.lease is not None
            assert told.answer.lease.number in (guess, guess - 1)
            evil._transport.send([memoryview(bytes(48))])
            if told.answer.lease.number == guess:
                verdict = next_told(evil).answer
                assert verdict.verdict == "refused"
                assert "before its lease was assigned" in verdict.reason


def test_validation_slice_is_answered_only_by_its_owner_within_size() -> None:
    with plane("a", "b", patience=1) as ps:
        for node in ps.nodes:
            node.mood.seconds = 0.002
        results: list[Any] = []
        running = threading.Thread(target=lambda: results.append(ps.watch(job(SYNC, epochs=30), weights())))
        running.start()
        wait_until(lambda: ps.version() > 0)
        while running.is_alive():
            with stranger(ps) as evil:
                joined(evil)
                try:
                    for number in range(200):
                        evil.send(m.Validated(run="linear-1", number=number, loss=0.0, correct=10.0))
                except ConnectionLost:
                    pass
        running.join()
    record, _ = unpack(results[0][0])
    honest = [v.accuracy for v in record.validations]
    with plane("a") as ps:
        alone, _ = ps.run(job(SYNC, epochs=30), weights())
    assert honest == [v.accuracy for v in alone.validations]


def test_more_correct_answers_than_samples_are_rejected() -> None:
    with plane(patience=1) as ps, stranger(ps) as evil, ps.control() as control:
        joined(evil)
        control.submit(job(SYNC, epochs=1), weights(), [])
        lease = play(evil)
        while True:
            push = Push(number=lease.number, seconds=0.01)
            evil.send(m.Contribution(run="linear-1", push=push), [bytes(48)])
            while not isinstance(header := evil.receive().header, m.ServerReply | m.Validate):
                pass
            if isinstance(header, m.Validate):
                break
            lease = header.answer.lease
        part = header.slices[0]
        evil.send(m.Validated(run="linear-1", number=part.number, loss=0.0, correct=part.size + 1.0))
        told_until_closed(evil)
        wait_until(lambda: refusals(ps))
        assert "22 right answers for 21 samples" in refusals(ps)[-1]["detail"]


def test_run_with_an_existing_name_gets_another_name() -> None:
    with plane("a") as ps:
        for _ in range(2):
            ps.run(job(SYNC), weights())
        wait_until(lambda: (ps.home.runs / "linear-1-2" / "end.json").exists())
        assert sorted(path.name for path in ps.home.runs.iterdir()) == ["linear-1", "linear-1-2"]


def test_second_run_with_the_longest_name_is_prepared_and_can_be_stopped() -> None:
    name = "a" * 120
    with plane("a") as ps:
        (ps.home.runs / name).mkdir(parents=True)
        with ps.control() as control:
            run = control.submit(job(SYNC, run=name, epochs=4000), weights(), ())
            assert run == f"{'a' * 118}-2"
            wait_until(lambda: ps.version() > 0)
            control.change(m.StopRun(run=run))
            assert control.watch(run, lambda _: None, lambda: None).record


@pytest.mark.parametrize("seconds", [5e-324, 1e-101])
def test_work_of_almost_no_seconds_is_refused(seconds: float) -> None:
    with plane(patience=2.0) as ps, stranger(ps) as evil:
        send_after_joining(m.Contribution(run="linear-1", push=unchecked_push(seconds)))(evil)
        told_until_closed(evil)
        assert ps.ask().nodes


def test_memory_of_a_heartbeat_is_bounded_as_in_a_record() -> None:
    with plane(patience=2.0) as ps, stranger(ps) as evil:
        send_after_joining(m.Heartbeat(peak_memory_bytes=2**53 + 1))(evil)
        told_until_closed(evil)
