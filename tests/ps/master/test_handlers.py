"""Who may join is decided from what it says of itself, with a cure or remarks; what may bring how many bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from evener.agreements.messages import Push
from evener.doctor.peers import CLOCK_SECONDS
from evener.ps.master.handlers import Handlers
from evener.ps.master.joining import Admission, admission_of
from evener.ps.protocol.config import Versions
from evener.ps.protocol.messages import PROTOCOL_VERSION, Contribution, Join
from evener.wire.errors import BadFrame

HERE = Versions("0.1.0", "3.11.7", "2.13.0")


def join(**words: Any) -> Join:
    usual: dict[str, Any] = {
        "protocol": PROTOCOL_VERSION,
        "name": "attic",
        "incarnation": 1,
        "evener": "0.1.0",
        "python": "3.11.2",
        "torch": "2.13.1",
        "clock": 1000.0,
        "device": "cpu",
    }
    return Join(**{**usual, **words})


def test_node_of_the_same_version_is_admitted_without_remarks() -> None:
    assert admission_of(join(), HERE, 1000.0) == Admission()
    assert admission_of(join(torch=""), HERE, 1000.0 + CLOCK_SECONDS) == Admission()


def test_node_of_another_protocol_is_rejected_with_both_versions() -> None:
    found = admission_of(join(protocol=PROTOCOL_VERSION + 1, evener="9.0"), HERE, 1000.0)
    assert found.refusal == (
        "Evener 9.0 on the node does not understand Evener 0.1.0 on the master: install the same version on both"
    )


@pytest.mark.parametrize("name", ["", " attic", "at\ntic", "x" * 65])
def test_unprintable_or_overlong_node_name_is_rejected(name: str) -> None:
    assert "1 to 64 printable characters" in admission_of(join(name=name), HERE, 1000.0).refusal


@pytest.mark.parametrize(
    ("words", "remark"),
    [
        ({"clock": 1008.0}, "the clock of node attic is 8 s ahead of the master's: let both follow NTP"),
        ({"clock": 992.0}, "the clock of node attic is 8 s behind the master's: let both follow NTP"),
        ({"evener": "0.1.1"}, "node attic runs Evener 0.1.1, the master 0.1.0"),
        ({"python": "3.12.1"}, "node attic runs Python 3.12, the master 3.11"),
        ({"torch": "2.12.0"}, "node attic runs PyTorch 2.12, the master 2.13"),
    ],
)
def test_admission_remarks_on_differences_from_the_master(words: dict[str, Any], remark: str) -> None:
    assert admission_of(join(**words), HERE, 1000.0) == Admission(remarks=(remark,))


@pytest.mark.parametrize(("lengths", "reason"), [((8, 8), "a contribution has one buffer, got 2"), ((16,), "")])
def test_contribution_in_several_buffers_is_rejected(lengths: tuple[int, ...], reason: str) -> None:
    run = SimpleNamespace(job=SimpleNamespace(nodes=None), inbox=lambda _, __, size: memoryview(bytes(size)))
    place = Handlers(
        cast(Any, SimpleNamespace(clock=None, patience=1.0)),
        cast(Any, SimpleNamespace(at=lambda peer: "node")),
        cast(Any, SimpleNamespace(training_of=lambda node: run)),
        cast(Any, None),
        cast(Any, SimpleNamespace(send=None, fail=None)),
    ).place
    header = Contribution(run="r", push=Push(number=1, seconds=1.0))
    if reason:
        with pytest.raises(BadFrame, match=reason):
            place(0, header, lengths)
    else:
        assert [len(one) for one in place(0, header, lengths) or ()] == [16]


def quiet_handlers(closed: list[int], *peers: int, submitting: int = 0) -> Any:
    """Handlers of commands that were heard at 0 s, and whose connections are closed after 4 s."""
    handlers: Any = Handlers.__new__(Handlers)
    handlers._config = SimpleNamespace(patience=1.0)
    handlers._heard, handlers._nodes = dict.fromkeys(peers, 0.0), SimpleNamespace(at=lambda _: None)
    handlers._server = SimpleNamespace(disconnect=lambda peer, _: closed.append(peer), is_sending=lambda _: False)
    handlers._examinations = SimpleNamespace(tick=lambda _: None, is_of=lambda _: False)
    handlers._fetches, handlers._joining = SimpleNamespace(serve=lambda: None), SimpleNamespace(tick=lambda: None)
    submissions = SimpleNamespace(tick=lambda: None, stalled=lambda: None, is_of=lambda peer: peer == submitting)
    handlers._scheduler = SimpleNamespace(submissions=submissions, is_watching=lambda _: False)
    return handlers


def test_slow_submission_outlives_the_limit_of_idle_connections() -> None:
    closed = list[int]()
    quiet_handlers(closed, 3, 4, submitting=3).tick(100.0)
    assert closed == [4]


def test_command_that_watched_a_run_receives_its_result_before_it_counts_as_idle() -> None:
    closed = list[int]()
    handlers = quiet_handlers(closed, 3)
    handlers._scheduler.is_watching = lambda _: True
    handlers.tick(100.0)
    handlers._scheduler.is_watching = lambda _: False  # the run is over
    handlers._server.is_sending = lambda _: True
    handlers.tick(101.0)
    handlers.tick(120.0)
    handlers._server.is_sending = lambda _: False
    handlers.tick(123.0)
    assert closed == []
    handlers.tick(125.0)
    assert closed == [3]
