"""The end of a rank's process always reaches the node, also if the process could not start."""

from __future__ import annotations

import errno
import queue
from pathlib import Path
from typing import Any, NoReturn

import pytest

from evener.commands.rank_host import host_of
from evener.launch.processes import LocalProcesses
from evener.ps.node.rank_session import Ending, Host, RankSession, RankSetup
from evener.ps.protocol.rank_messages import RankEnded, RankJob, RankNode, RankPlace
from evener.records.record import WEIGHTS


def setup_in(folder: Path, **callbacks: Any) -> RankSetup:
    """Parameters of a rank that works alone."""
    node = RankNode(name="a", device="cpu", host="h", speed=1.0)
    place = RankPlace(rank=0, nodes=(node,), secret=bytes(16), patience=10.0, is_late=False)
    job = RankJob(run="r", task="tiny", title="tiny", config=b"{}")
    return RankSetup(job=job, place=place, process=1, code=None, data=None, folder=folder, **callbacks)


def test_process_that_cannot_start_is_reported_as_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(LocalProcesses, "start", fail)
    ended: queue.SimpleQueue[Ending] = queue.SimpleQueue()
    one = host_of(1.0, "127.0.0.1").start(setup_in(tmp_path, on_ended=ended.put))
    ending = ended.get(timeout=30)
    assert (ending.has_finished, ending.is_own) == (False, True)
    assert "Resource temporarily unavailable" in ending.sentence
    one.tell(b"")
    one.stop(at_once=False)
    one.stop(at_once=True)
    one.close()


def test_unreadable_weights_are_a_failure_of_the_process(tmp_path: Path) -> None:
    sent: list[tuple[Any, ...]] = []
    (tmp_path / WEIGHTS).mkdir()
    hosted: list[RankSetup] = []

    def start(setup: RankSetup) -> Any:
        hosted.append(setup)

    RankSession(Host(start=start, speed=1.0), setup_in(tmp_path), lambda *parts: sent.append(parts), lambda _: None)
    hosted[0].on_ended(Ending(True, None, False, "", "ended with exit code 0"))
    ((header,),) = sent
    assert isinstance(header, RankEnded)
    assert not header.has_finished
    assert header.is_own
    assert "Is a directory" in header.sentence
