"""A run whose ranks work together, and that goes wrong at the master: the master sets it aside, and goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evener.ps.master.nodes import NodeRecord, Nodes
from evener.ps.master.ranks.rank_journal import RankJournal, Roster, RunStart
from evener.ps.master.ranks.rank_training import RankTraining
from evener.ps.master.scheduler import Scheduler
from evener.ps.protocol.config import MasterConfig, StateDir
from evener.ps.protocol.messages import AssignNodes, Header, Release, RunAccepted, RunFinished, RunRejected
from evener.ps.protocol.rank_messages import PrepareRank, RankJob, RankReady, StartRank
from evener.records.error_kind import kind_of
from evener.records.errors import EvenerError
from evener.records.profile import DeviceProfile
from evener.wire.frame import Buffer
from evener.wire.identity import make_identity
from support.master_in_threads import VERSIONS

COMMAND = 7
PROFILE = DeviceProfile(node="any", device="cpu", model="", cores=1, memory_bytes=1, usable_memory_bytes=1)


class Stage:
    """A scheduler with one node, and what it sends and tells."""

    def __init__(self, folder: Path) -> None:
        self.told: list[str] = []
        self.sent: list[tuple[int | None, Any]] = []
        self.home = StateDir(folder)
        identity = make_identity(insecure=True)
        self.config = MasterConfig(self.home, identity, VERSIONS, {}, 5.0, self.told.append)
        self.nodes = Nodes(5.0)
        self.scheduler = Scheduler(self.config, self.nodes, self._send)

    def _send(self, peer: int | None, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        self.sent.append((peer, header))

    def submit(self, run: str, nodes: tuple[str, ...] | None = None) -> None:
        job = msgspec.msgpack.encode(RankJob(run=run, task="tiny", title="tiny", config=b"{}", nodes=nodes))
        self.scheduler.submit(COMMAND, [memoryview(job)], "somebody")

    def join(self, name: str) -> NodeRecord:
        node = self.nodes.record(name)
        node.profile = PROFILE
        self.nodes.decide("joined", node, 0.0, incarnation=1)
        self.nodes.connect(node, 3)
        self.scheduler.admit(node)
        return node

    def sent_of(self, kind: type) -> list[Any]:
        return [header for _, header in self.sent if isinstance(header, kind)]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.scheduler.close()


def fail(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError("a mistake of the master's own")


@pytest.mark.parametrize("method", ["tick", "admit", "stop"])
def test_run_with_an_error_at_the_master_is_set_aside_before_the_next(
    stage: Stage, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.submit("first")
    node = stage.join("a")
    with monkeypatch.context() as patch:
        patch.setattr(RankTraining, method, fail)
        stage.scheduler.admit(node)
        stage.scheduler.tick(1.0, lambda _: False)
        stage.scheduler.stop("first")
    (finished,) = stage.sent_of(RunFinished)
    assert finished.kind == kind_of(EvenerError(""))
    assert "run first cannot be continued (ZeroDivisionError: a mistake of the master's own)" in finished.reason
    assert [release.run for release in stage.sent_of(Release)] == ["first"]
    assert stage.told[-1].startswith(f"warning: {finished.reason}")
    assert "test_rank_run.py" in stage.home.audit.read_text()
    stage.submit("second")
    assert [accepted.run for accepted in stage.sent_of(RunAccepted)] == ["first", "second"]


def test_torn_journal_is_set_aside_before_the_next_run(stage: Stage) -> None:
    journal = RankJournal(stage.home, "torn", stage.told.append)
    journal.add(RunStart(job=RankJob(run="torn", task="tiny", title="tiny", config=b"{}"), secret=b"s"))
    journal.add(Roster(names=("a", "b"), numbers=(1,), given_up=(), next=2, generation=None))
    journal.close()
    stage.scheduler.resume()
    assert stage.scheduler.runs == []
    assert "run torn cannot be continued (ValueError" in stage.told[-1]
    assert list(stage.home.aside.glob("*/ranks-*.journal"))
    stage.submit("next")
    assert [accepted.run for accepted in stage.sent_of(RunAccepted)] == ["next"]


def test_unstarted_run_of_a_killed_master_starts_under_the_next_one(stage: Stage) -> None:
    stage.submit("first")
    stage.scheduler.close()
    later = Stage(stage.home.folder)
    later.scheduler.resume()
    node = later.join("a")
    later.scheduler.watch(COMMAND, "first")
    assert [prepared.run for prepared in later.sent_of(PrepareRank)] == ["first"]
    run = later.scheduler.ranks_of("first")
    assert run is not None
    run.ready(node, RankReady(run="first", speed=1.0))
    later.scheduler.tick(1.0, lambda _: False)
    assert [started.process for started in later.sent_of(StartRank)] == [1]
    later.scheduler.close()


def test_run_without_a_name_is_rejected(stage: Stage) -> None:
    job = {"run": "", "task": "tiny", "title": "tiny", "config": b"{}"}
    stage.scheduler.submit(COMMAND, [memoryview(msgspec.msgpack.encode(job))], "somebody")
    (rejected,) = stage.sent_of(RunRejected)
    assert "run must be a name, got ''" in rejected.reason


def test_runs_on_different_nodes_go_on_side_by_side_and_outlive_the_master(stage: Stage) -> None:
    stage.submit("first", ("a",))
    stage.submit("other", ("b",))
    stage.submit("third", ("b", "c"))
    stage.submit("whole")
    assert [accepted.run for accepted in stage.sent_of(RunAccepted)] == ["first", "other"]
    assert len(stage.sent_of(RunRejected)) == 2
    stage.join("a")
    assert [prepared.run for prepared in stage.sent_of(PrepareRank)] == ["first"]
    stage.scheduler.close()
    later = Stage(stage.home.folder)
    later.scheduler.resume()
    assert [(run.name, run.status.nodes) for run in later.scheduler.runs] == [("first", ("a",)), ("other", ("b",))]
    later.scheduler.close()


def test_nodes_of_a_run_can_be_assigned_to_another(stage: Stage) -> None:
    stage.submit("first", ("a",))
    stage.submit("other", ("b",))
    stage.join("a")
    stage.scheduler.assign(COMMAND, AssignNodes(run="other", nodes=("a",)))
    assert len(stage.sent_of(RunRejected)) == 1
    for run, nodes in (("first", ()), ("other", ("a",))):
        stage.scheduler.assign(COMMAND, AssignNodes(run=run, nodes=nodes))
    assert [(run.name, run.status.nodes) for run in stage.scheduler.runs] == [("first", ()), ("other", ("a",))]
    assert [prepared.run for prepared in stage.sent_of(PrepareRank)] == ["first", "other"]
    assert [released.run for released in stage.sent_of(Release)] == ["first"]
    stage.submit("whole")  # beside a run that is paused, but not beside one that is not
    assert len(stage.sent_of(RunRejected)) == 2
