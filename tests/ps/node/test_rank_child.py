"""The end of a rank's process always reaches the node, also if the process could not start."""

from __future__ import annotations

import errno
import queue
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from evener.launch.parent import Parent
from evener.launch.processes import LocalProcesses
from evener.membership.shared_values import Values
from evener.ps.node.rank_child import RankChild, RankHost, RankTask
from evener.ps.protocol.rank_messages import RankEnded, RankNode, RankPlace
from evener.records.record import WEIGHTS


def session_in(folder: Path, sent: queue.SimpleQueue[Any]) -> RankChild:
    """A rank that works alone, and whose work is nothing."""
    node = RankNode(name="a", device="cpu", host="h", speed=1.0)
    place = RankPlace(rank=0, nodes=(node,), secret=bytes(16), patience=10.0, is_late=False)
    task = RankTask(
        run="r",
        config=b"{}",
        task="tiny",
        data=None,
        folder=str(folder),
        place=place,
        process=1,
        resumes=False,
        brings_program=False,
        towards="127.0.0.1",
    )
    host = RankHost(do_nothing, 1.0, "127.0.0.1", lambda: LocalProcesses([]))
    return RankChild(host, task, lambda *parts: sent.put(parts), lambda _: None)


def do_nothing(_parent: Parent, _task: RankTask) -> None:
    """End well."""


@pytest.mark.posix
def test_process_that_cannot_start_is_reported_as_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(LocalProcesses, "start", fail)
    sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
    one = session_in(tmp_path, sent)
    (header,) = sent.get(timeout=30)
    assert isinstance(header, RankEnded)
    assert (header.has_finished, header.is_own) == (False, True)
    assert "Resource temporarily unavailable" in header.sentence
    one.stop(at_once=False)
    one.stop(at_once=True)
    one.close()


@pytest.mark.posix
def test_process_that_has_ended_is_neither_stopped_nor_told(tmp_path: Path) -> None:
    """The master asks for that if the report of the end was lost with its connection."""
    sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
    one = session_in(tmp_path, sent)
    (header,) = sent.get(timeout=60)
    assert isinstance(header, RankEnded)
    one.stop(at_once=False)
    one.stop(at_once=True)
    one.told(msgspec.msgpack.encode(Values(number=1, values=())))
    one.resend()
    assert sent.get(timeout=10) == (header,)
    one.close()


@pytest.mark.posix
def test_unreadable_weights_are_a_failure_of_the_process(tmp_path: Path) -> None:
    sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
    (tmp_path / WEIGHTS).mkdir()
    one = session_in(tmp_path, sent)
    (header,) = sent.get(timeout=60)
    one.close()
    assert isinstance(header, RankEnded)
    assert not header.has_finished
    assert header.is_own
    assert "Is a directory" in header.sentence
