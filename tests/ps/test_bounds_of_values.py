"""Whatever value a peer's message may have, what the master sends and writes because of it decodes again.

Every field of every message takes the values at the ends of its type, alone and together with all others, in a run of
each kind, in an examination, and when the master restarts. Each is decoded by its reader's own decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from evener.agreements.messages import Push
from evener.doctor.peers import Link, Unreached
from evener.membership.generation import Beat, Hello, ReachedPeers
from evener.membership.shared_values import AskValues, SetValue
from evener.ps.protocol import examination_messages as e
from evener.ps.protocol import messages as m
from evener.ps.protocol import rank_messages as r
from evener.ps.protocol.blob import Blob
from evener.ps.protocol.blob_transfer import BlobSender
from evener.ps.protocol.job import Job, encode_job
from evener.records.error_kind import kind_of
from evener.records.errors import NodeLost
from evener.records.events import Phase, RunEvent
from evener.records.plan import Plan
from evener.records.record import Epoch, Event, TrainRecord, Validation
from support.agreements import SYNC
from support.checked_master import ADMIN, CheckedMaster
from support.extreme_values import Change, changes
from support.fake_runs import NODES, fake_run
from support.linear_engine import job, weights
from support.machine_facts import SOUND
from support.strangers import introduction

KEY = "1" * 64
KIND = kind_of(NodeLost(""))
RECORD = replace(fake_run((2,), NODES[:1], num_steps=1), validations=(), events=())
VALIDATION = Validation(step=1, epoch=0, loss=1.0, accuracy=0.5, seconds=0.1, metrics={"top5": 0.5})
PHASE = Phase(what="training", num_samples=1000, epochs=1)
EPOCH = Epoch(step=1, epoch=0, loss=1.0)
EVENT = Event(step=1, kind="checkpoint", message="written", nodes=("a",))
JOIN = introduction("a")
PROFILED = m.Profiled(profile=introduction("a", profiled=True).profile)  # type: ignore[arg-type]
CONTRIBUTION = m.Contribution(run="r", push=Push(number=1, seconds=1.0, loss=1.0, unused=(1,)))
VALIDATED = m.Validated(run="r", number=1, loss=1.0, correct=1.0)
RANK_JOB = r.RankJob(run="r", task="tiny", title="tiny", data_dir="d", config=b"{}")
REPORT = e.NodeReport(facts=SOUND, places=(e.Place(machine="a", address="10.0.0.1", port=1),))
LINKS = e.LinksReport(
    links=(Link(machine="b", seconds=1.0),), unreached=(Unreached(machine="c", address="x", port=1, reason="no"),)
)


def lease_run(master: CheckedMaster, _folder: Path) -> None:
    """A run on leases, with a restart of the master; then another run of that name, if the job is changed."""
    master.join(1, "a", KEY)
    master.deliver(ADMIN, m.Invite(seconds=60.0))
    for _ in range(1 + master.changes(job(SYNC))):
        one = master.changed(job(SYNC, run="r", epochs=2))
        master.deliver(ADMIN, m.SubmitRun(), encode_job(one), weights().memory)
        work(master, 3)
        master.deliver(1, m.Heartbeat(peak_memory_bytes=1, steps=1))
        master.deliver(ADMIN, m.AssignNodes(run="r", nodes=("a",)))
        master.pass_time()
        master.ask()
        master.restart()
        master.join(1, "a", KEY)
        work(master, 3)
        master.deliver(1, m.Heartbeat(peak_memory_bytes=1, steps=1))
        master.pass_time()
        for run in master.ask().runs:
            master.deliver(ADMIN, m.StopRun(run=run.run))
        master.pass_time()
    master.deliver(1, m.Leave())


def refused_run(master: CheckedMaster, _folder: Path) -> None:
    """A run that its only node cannot take part in, and an examination of that node."""
    master.join(1, "a", KEY)
    master.deliver(ADMIN, m.SubmitRun(), encode_job(job(SYNC, run="r")), weights().memory)
    master.deliver(1, m.NotReady(run="r", reason="no data"))
    examine(master)
    master.pass_time()
    master.deliver(ADMIN, m.ExpelNode(name="a"))


def work(master: CheckedMaster, most: int) -> None:
    """Let node a do what it is asked for, so many answers at most."""
    server, read = master.server, 0
    while read < len(server.sent) and most > 0:
        (_, header, _), read = server.sent[read], read + 1
        if isinstance(header, m.Prepare):
            master.deliver(1, m.Ready(run=header.run, unit_seconds=1e-3))
            master.pass_time()
        elif isinstance(header, m.ServerReply) and header.answer.lease is not None:
            push = master.changed(Push(number=header.answer.lease.number, seconds=1.0, loss=1.0, unused=(1,)))
            master.deliver(1, m.Contribution(run=header.run, push=push), bytes(48))
            most -= 1
        elif isinstance(header, m.Validate):
            for part in header.slices:
                master.deliver(1, m.Validated(run=header.run, number=part.number, loss=1.0, correct=1.0))


def rank_run(master: CheckedMaster, folder: Path) -> None:
    """A run of ranks: one at the start, one that joins; events, a checkpoint, a restart of the master, the end."""
    master.join(1, "a", KEY)
    for _ in range(1 + master.changes(RANK_JOB)):
        master.deliver(ADMIN, m.SubmitRun(), r.encode_rank_part(master.changed(RANK_JOB)))
        accepted = master.sent(m.RunAccepted, ADMIN)
        if not accepted:
            return
        run = accepted[-1][0].run
        process = started(master, 1, run)
        master.say(1, r.RankSaid(run=run, process=process), Hello(node="a", initial_nodes=("a",)))
        master.say(1, r.RankSaid(run=run, process=process), SetValue(number=1, key="k", value=b"v"))
        master.say(1, r.RankSaid(run=run, process=process), AskValues(number=1, keys=("k",), waits=True))
        master.say(1, r.RankSaid(run=run, process=process), Beat(count=1, step=1, holds=1))
        show(master, run, process)
        master.join(2, "b", "2" * 64)
        other = started(master, 2, run)
        master.say(2, r.RankSaid(run=run, process=other), Hello(node="b"))
        master.say(2, r.RankSaid(run=run, process=other), ReachedPeers(processes=(process,)))
        save(master, folder, run, process)
        master.ask()
        master.restart()
        master.join(1, "a", KEY)
        master.deliver(1, r.RankReady(run=run, process=process, speed=1.0))
        master.say(1, r.RankSaid(run=run, process=process), Beat(count=2, step=2, holds=1))
        show(master, run, process)
        ended = r.RankEnded(
            run=run,
            process=process,
            has_finished=False,
            kind=kind_of(NodeLost("")),
            is_own=True,
            sentence="s",
            ending="e",
        )
        master.deliver(1, ended)
        master.pass_time()
        master.deliver(ADMIN, m.StopRun(run=run, at_once=True))
        master.pass_time()


def started(master: CheckedMaster, peer: int, run: str) -> int:
    """Return the number of the process on a node, once that is ready."""
    master.deliver(peer, r.RankReady(run=run, speed=1.0))
    master.pass_time()
    starts = [header.process for header, _ in master.sent(r.StartRank, peer) if header.run == run]
    return starts[-1] if starts else 0


def show(master: CheckedMaster, run: str, process: int) -> None:
    events: list[RunEvent] = [RECORD.plan, PHASE, *RECORD.steps, VALIDATION, EPOCH, EVENT]
    for one in events:
        master.show(1, r.RankShown(run=run, process=process), one)
    master.pass_time()
    master.show(1, r.RankShown(run=run, process=process), replace(RECORD, steps=()))
    master.pass_time()


def save(master: CheckedMaster, folder: Path, run: str, process: int) -> None:
    """Offer and send a checkpoint, and wait until it is on the disk."""
    (folder / "model.safetensors").write_bytes(b"w")
    blob = Blob(folder, ["model.safetensors"])
    master.deliver(1, r.RankSaved(run=run, process=process, step=1, digest=blob.digest))
    for fetch, _ in master.sent(m.FetchBlob, 1):
        chunk, data = BlobSender(blobs=[blob]).chunk(fetch)
        piece = r.RankPiece(run=run, digest=chunk.digest, offset=chunk.offset, total=chunk.total)
        master.deliver(1, piece, data)
        master.wait_for_disk(run)


def examination(master: CheckedMaster, _folder: Path) -> None:
    """An examination of one node."""
    master.join(1, "a", KEY)
    examine(master)


def examine(master: CheckedMaster) -> None:
    question = e.encode_part(master.changed(e.TaskQuestion(task="digits", data_dir="d", options={"k": "v"})))
    master.deliver(ADMIN, e.ExamineNodes(seconds=10.0), question, b"")
    for header, _parts in master.sent(e.Examine, 1):
        master.say(1, e.Examined(number=header.number, clock=1.0), REPORT)
        master.pass_time(7.0)
        master.say(1, e.Probed(number=header.number), LINKS)
        master.pass_time(7.0)


SCENES: dict[Callable[[CheckedMaster, Path], None], tuple[Any, ...]] = {
    lease_run: (
        JOIN, PROFILED, m.Ready(run="r", unit_seconds=1.0), CONTRIBUTION.push, VALIDATED,
        m.Heartbeat(peak_memory_bytes=1, steps=1), m.Invite(seconds=60.0), job(SYNC, run="r", epochs=2),
        m.AssignNodes(run="r", nodes=("a",)),
    ),
    refused_run: (m.NotReady(run="r", reason="no data"), JOIN),
    rank_run: (
        JOIN, RANK_JOB, r.RankReady(run="r", speed=1.0), Hello(node="a", initial_nodes=("a",)),
        Beat(count=1, step=1, holds=1), ReachedPeers(processes=(1,)), SetValue(number=1, key="k", value=b"v"),
        AskValues(number=1, keys=("k",), waits=True), RECORD.plan, RECORD.steps[0], VALIDATION,
        EPOCH, EVENT, PHASE, replace(RECORD, steps=()),
        r.RankSaved(run="r", process=1, step=1, digest=""),
        r.RankEnded(
            run="r", process=1, has_finished=False, kind=KIND, is_own=True, sentence="s", ending="e"
        ),
    ),
    examination: (
        JOIN, e.Examined(number=1, clock=1.0), REPORT, e.Probed(number=1), LINKS, e.ExamineNodes(seconds=1.0),
        e.TaskQuestion(task="digits", data_dir="d", options={"k": "v"}),
    ),
}  # fmt: skip
_MANY_FIELDS = (TrainRecord, Job, Plan)
CASES = [
    pytest.param(scene, message, marks=pytest.mark.slow if isinstance(message, _MANY_FIELDS) else ())
    for scene, messages in SCENES.items()
    for message in messages
]


@pytest.mark.parametrize(("scene", "message"), CASES, ids=lambda one: getattr(one, "__name__", type(one).__name__))
def test_what_the_master_makes_of_any_message_decodes_again(
    scene: Callable[[CheckedMaster, Path], None], message: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = {}
    for number, change in enumerate([Change("none", ()), *changes(message)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        master = CheckedMaster(folder / "home", monkeypatch, change, type(message))
        scene(master, folder)
        master.restart()
        master.end()
        master.check_files()
        assert change.fields or scene is not lease_run or master.num_records
        if master.faults:
            faults[change.name] = master.faults
    assert faults == {}
