"""All nodes are looked at, and the links between them: what the master asks and waits for, and what nodes answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from evener.doctor.facts import MachineFacts
from evener.doctor.peers import DataFacts, Link
from evener.ps.master.examination.examinations import Examinations
from evener.ps.master.nodes import Nodes
from evener.ps.node.acceptance import Acceptance
from evener.ps.node.node_examination import NodeExaminer, links_to
from evener.ps.protocol.blob import Blob
from evener.ps.protocol.examination_messages import (
    Examination,
    Examine,
    Examined,
    ExaminedNode,
    ExamineNodes,
    LinksReport,
    NodeReport,
    NodesExamined,
    Place,
    Probed,
    ProbeNodes,
    TaskQuestion,
    decode_part,
    encode_part,
)
from evener.ps.protocol.messages import Header
from evener.records.errors import InvalidInput
from evener.wire.errors import BadFrame
from support.linear_engine import job, weights
from support.machine_facts import SOUND
from support.master_in_threads import plane, wait_until
from support.refusals import refused

PLACES = {name: Place(machine=name, address="10.0.0.1", port=port) for name, port in (("ada", 1), ("bob", 2))}


class Desk:
    """Examinations of two nodes, ada at connection 1 and bob at 2; what was sent is kept, and time stands still."""

    def __init__(self) -> None:
        self.nodes, self.now = Nodes(10.0), 0.0
        self.sent: list[tuple[int | None, Header, Sequence[Any]]] = []
        for peer, name in enumerate(PLACES, 1):
            record = self.nodes.record(name)
            self.nodes.decide("joined", record, 0.0, 1)
            self.nodes.connect(record, peer)
        self.examinations = Examinations(self.nodes, self._send, lambda: SOUND, wall_clock=lambda: 1000.0)

    def ask(self, *buffers: bytes, busy_with: str = "") -> None:
        views = [memoryview(one) for one in buffers]
        self.examinations.ask(9, ExamineNodes(seconds=10.0), views, "alice", busy_with, self.now)

    def report(self, name: str, clock: float = 1000.0) -> None:
        report = NodeReport(facts=replace(SOUND, machine="its own name"), places=(PLACES[name],))
        words = [memoryview(encode_part(report))]
        self.examinations.examined(self.nodes.record(name), Examined(number=1, clock=clock), words)

    def probed(self, name: str, *links: Link) -> None:
        words = [memoryview(encode_part(LinksReport(links=links)))]
        self.examinations.probed(self.nodes.record(name), Probed(number=1), words)

    def of(self, kind: type[Header]) -> list[tuple[int | None, Any, Sequence[Any]]]:
        return [one for one in self.sent if isinstance(one[1], kind)]

    def tick(self, kind: type[Header]) -> list[tuple[int | None, Any, Sequence[Any]]]:
        """What was sent of a kind, once the thread that looks at the master's machine has made that due."""

        def come() -> Any:
            self.examinations.tick(self.now)
            return self.of(kind)

        found: list[tuple[int | None, Any, Sequence[Any]]] = wait_until(come, kind.__name__)
        return found

    def _send(self, peer: int | None, header: Header, buffers: Sequence[Any] = ()) -> None:
        self.sent.append((peer, header, buffers))


def test_examination_collects_reports_then_link_probes() -> None:
    desk = Desk()
    desk.ask()
    assert [(peer, header) for peer, header, _ in desk.of(Examine)] == [
        (peer, Examine(number=1, seconds=10.0)) for peer in (1, 2)
    ]
    desk.report("ada")
    desk.report("bob", clock=4600.0)
    told = {peer: decode_part(buffers[0], list[Place]) for peer, _, buffers in desk.tick(ProbeNodes)}
    assert told == {1: [PLACES["bob"]], 2: [PLACES["ada"]]}
    desk.probed("ada", Link(machine="bob", seconds=0.001))
    desk.examinations.tick(desk.now)
    assert not desk.of(NodesExamined)
    desk.probed("bob")
    [(peer, header, [data])] = desk.tick(NodesExamined)
    assert (peer, header.reason) == (9, "")
    master, ada, bob = decode_part(data, Examination).nodes
    assert master.report == NodeReport(facts=SOUND)
    assert (ada.name, ada.ahead, ada.links.links[0].machine) == ("ada", 0.0, "bob")
    assert (bob.name, bob.ahead) == ("bob", 3600.0)
    assert bob.report is not None
    assert bob.report.facts.machine == "bob"


def test_silent_node_is_awaited_until_the_timeout_and_no_longer() -> None:
    desk = Desk()
    desk.ask()
    desk.report("ada")
    desk.examinations.tick(5.9)
    assert not desk.of(ProbeNodes)
    desk.now = 6.0
    assert [peer for peer, _, _ in desk.tick(ProbeNodes)] == [1]
    desk.now = 10.0
    [(_, _, [data])] = desk.tick(NodesExamined)
    assert [one.report is None for one in decode_part(data, Examination).nodes[1:]] == [False, True]


@pytest.mark.parametrize(
    "places",
    [
        [("127.0.0.1", 22)], [("::1", 22)], [("ff02::1", 5)], [("0.0.0.0", 5)], [("a-name", 80)], [("10.0.0.9", 0)],
        [("10.0.0.9", 2**16)],
    ],
)  # fmt: skip
def test_node_cannot_direct_probes_to_local_or_invalid_addresses(places: list[tuple[str, int]]) -> None:
    assert told_places(places) == []


def test_node_cannot_direct_probes_to_more_than_four_addresses() -> None:
    assert len(told_places([("10.0.0.9", port) for port in range(1, 100)])) == 4


def told_places(places: list[tuple[str, int]]) -> list[Place]:
    """Where bob is told to connect to, if ada says that it listens at these places."""
    desk = Desk()
    desk.ask()
    own = tuple(Place(machine="bob", address=address, port=port) for address, port in places)
    words = [memoryview(encode_part(NodeReport(facts=SOUND, places=own)))]
    desk.nodes.record("ada").origin = "10.0.0.9, port 4711"
    desk.examinations.examined(desk.nodes.record("ada"), Examined(number=1, clock=0.0), words)
    desk.report("bob")
    [data] = next(buffers for peer, _, buffers in desk.tick(ProbeNodes) if peer == 2)
    return decode_part(data, list[Place])


def test_master_runs_one_examination_and_no_task_check_during_a_run() -> None:
    desk = Desk()
    question = encode_part(TaskQuestion(task="digits"))
    desk.ask(question, b"", busy_with="digits-1")
    assert "run digits-1 is in progress, and nodes load no other task" in desk.of(NodesExamined)[0][1].reason
    desk.ask(question, b"", busy_with="")
    assert decode_part(desk.of(Examine)[0][2][0], TaskQuestion).submitter == "alice"
    desk.ask()
    assert "another examination is in progress" in desk.of(NodesExamined)[1][1].reason
    assert desk.examinations.is_of(9)
    desk.examinations.disconnected(9)
    desk.ask()
    assert len(desk.of(Examine)) == 4


@pytest.mark.parametrize("words", [b"", b"\xc1", encode_part({"facts": 1})])
def test_malformed_report_costs_its_sender_the_connection(words: bytes) -> None:
    desk = Desk()
    desk.ask()
    with refused(BadFrame):
        desk.examinations.examined(desk.nodes.record("ada"), Examined(number=1, clock=0.0), [memoryview(words)])


def test_nodes_of_a_real_master_report_their_links_during_a_run() -> None:
    from support.agreements import SYNC

    with plane("ada", "bob") as ps, ps.control() as control:
        master, ada, bob = control.examine(8.0).nodes
        assert [(one.name, one.report is not None) for one in (master, ada, bob)] == [
            ("master", True), ("ada", True), ("bob", True),
        ]  # fmt: skip
        assert ([link.machine for link in ada.links.links], ada.links.unreached) == (["bob"], ())
        assert bob.links.links[0].bytes_per_second > 1e5
        with ps.control() as other:
            long = replace(job(SYNC), workload=replace(job(SYNC).workload, num_epochs=10**6))
            run = other.submit(long, weights(), ())
            assert [one.report is not None for one in control.examine(8.0).nodes] == [True, True, True]
            with pytest.raises(InvalidInput, match=f"run {run} is in progress, and nodes load no other task"):
                control.examine(8.0, TaskQuestion(task="digits"))


def test_examined_task_is_loaded_from_the_submitted_code(tmp_path: Any) -> None:
    (tmp_path / "my_task.py").write_text("answer = 42\n")
    blob = Blob(tmp_path, ["my_task.py"])
    question = TaskQuestion(task="my_task.py", code=blob.digest, submitter="alice")
    words = [memoryview(encode_part(question)), memoryview(blob.read(0, blob.num_bytes))]
    sent: list[NodeReport] = []

    def look(asked: TaskQuestion | None, code: Any) -> tuple[MachineFacts, DataFacts | None]:
        assert code is None or (code / "my_task.py").read_text() == "answer = 42\n"
        return replace(SOUND, task_problem=None if asked is None else ""), None

    def keep(_: Header, buffers: Sequence[Any]) -> None:
        sent.append(decode_part(bytes(buffers[0]), NodeReport))

    for accepts in (Acceptance(), Acceptance(built_in_only=True)):
        examiner, before = NodeExaminer(look, tmp_path / "cache", accepts, keep), len(sent)
        examiner.examine(Examine(number=1, seconds=0.0), words)
        wait_until(partial(lambda before: len(sent) > before, before))
        examiner.close()
    assert sent[0].facts.task_problem == ""
    assert "--built-in-only" in (sent[1].facts.task_problem or "")


def test_refused_port_is_reported_with_its_reason() -> None:
    report = links_to([Place(machine="bob", address="127.0.0.1", port=9)], time.monotonic() + 5)
    assert [(one.machine, one.port, one.reason) for one in report.unreached] == [("bob", 9, "Connection refused")]
    assert links_to([], 0.0) == LinksReport()


def test_report_beyond_the_share_of_its_node_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener.ps.master.examination.examinations._MAX_REPORTS_BYTES", 64)
    assert [one.report is None for one in concluded(Desk(), "ada", "bob")] == [True, True]


def test_activity_of_a_node_may_be_as_long_as_its_reason() -> None:
    desk = Desk()
    desk.nodes.record("ada").doing = "cannot take part: " + "x" * 3900
    assert len(concluded(desk)[0].doing) > 3900


def concluded(desk: Desk, *reporting: str) -> Sequence[ExaminedNode]:
    """Return the results about all nodes at the end of the time, when some have reported."""
    desk.ask()
    for name in reporting:
        desk.report(name)
    for desk.now in (20.0, 40.0):
        desk.examinations.tick(desk.now)
    ((_, _, (found,)),) = desk.tick(NodesExamined)
    return decode_part(found, Examination).nodes[1:]
