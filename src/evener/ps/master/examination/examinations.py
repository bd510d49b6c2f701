"""The master's part of an examination: question the nodes, tell each where the others listen, and collect the results.

request -> every present node reports, or its time is up -> these nodes probe each other -> result to the command

One examination at a time. Nothing blocks: answers are stored, and `tick` takes the next step when it is due.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from msgspec.structs import replace

from evener.doctor.examine import examine
from evener.doctor.facts import MachineFacts, is_loopback
from evener.ps.master.nodes import NodeRecord, Nodes
from evener.ps.protocol.config import StateDir
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
from evener.ps.protocol.messages import Send
from evener.records.schema import shown
from evener.wire.errors import BadFrame
from evener.wire.identity import host_in

MASTER = "master"
"""Name of the master's own machine among the nodes."""
MAX_SECONDS = 20.0
"""Longest time for one examination, since commands wait for each other."""
_MAX_OWN_PLACES = 4
"""Limit of one node's addresses, so that no node makes the others connect to many."""
_MAX_REPORTS_BYTES = 2**25
"""Limit of all nodes' reports together; each node may use an equal part of it."""
_MAX_PLACES = 64
"""Limit of addresses that a node connects to."""
_REPORT_SHARE = 0.6
"""Share of the time for machines and task; the rest is for the links."""


@dataclass
class _Progress:
    """An examination that is not over."""

    peer: int
    number: int
    reports_until: float
    until: float
    nodes: list[NodeRecord]
    doing: dict[str, str]
    reports: dict[str, NodeReport] = field(default_factory=dict)
    aheads: dict[str, float] = field(default_factory=dict)
    links: dict[str, LinksReport] = field(default_factory=dict)
    probing: list[NodeRecord] = field(default_factory=list)
    is_probing: bool = False
    master: MachineFacts | None = None

    def has_room(self, buffers: Sequence[memoryview]) -> bool:
        """Return whether a node's report is short enough for the reports of all nodes to be kept."""
        return sum(map(len, buffers)) <= _MAX_REPORTS_BYTES // max(1, len(self.nodes))


class Examinations:
    """The examinations of a master.

    Args:
        nodes: all nodes.
        send: sends a message to a connection.
        look: returns the facts of the master's own machine; called in a thread.
        wall_clock: seconds since 1970.
    """

    def __init__(
        self,
        nodes: Nodes,
        send: Send,
        look: Callable[[], MachineFacts],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._nodes, self._send, self._look = nodes, send, look
        self._wall_clock = wall_clock
        self._master_facts: queue.SimpleQueue[tuple[int, MachineFacts]] = queue.SimpleQueue()
        self._number = 0
        self._progress: _Progress | None = None

    def ask(
        self,
        peer: int,
        request: ExamineNodes,
        buffers: Sequence[memoryview],
        submitter: str,
        busy_with: str,
        now: float,
    ) -> None:
        """Begin an examination that a command requests.

        Args:
            peer: connection of the command.
            request: its message.
            buffers: buffers of its message.
            submitter: name of its user.
            busy_with: name of the run in progress, if there is one.
            now: seconds, as for `tick`.

        Raises:
            BadFrame: the question cannot be decoded.
        """
        question = replace(decode_part(buffers[0], TaskQuestion), submitter=submitter) if buffers else None
        reason = ""
        if self._progress is not None:
            reason = "another examination is in progress: try again"
        elif question is not None and busy_with:
            reason = f"run {busy_with} is in progress, and nodes load no other task meanwhile: wait, or omit --task"
        if reason:
            self._send(peer, NodesExamined(reason=shown(reason)))
            return
        seconds = min(request.seconds, MAX_SECONDS)
        self._number += 1
        present = self._nodes.present
        self._progress = _Progress(
            peer,
            self._number,
            now + _REPORT_SHARE * seconds,
            now + seconds,
            present,
            {one.name: one.doing for one in present},
        )
        threading.Thread(target=self._look_here, args=(self._number,), daemon=True, name="evener-examine").start()
        payload = (encode_part(question), buffers[1]) if question is not None else ()
        for node in present:
            self._send(node.peer, Examine(number=self._number, seconds=seconds), payload)

    def is_wanted(self, node: NodeRecord, header: Examined | Probed) -> bool:
        """Return whether a node's report belongs to the examination in progress, which has none of it yet."""
        return self._awaiting(node, header) is not None

    def examined(self, node: NodeRecord, header: Examined, buffers: Sequence[memoryview]) -> None:
        """Store the report of a node, unless it is too long. Raises BadFrame: the report is malformed."""
        if (progress := self._awaiting(node, header)) is not None and progress.has_room(buffers):
            report = decode_part(_only(buffers), NodeReport)
            places = tuple(replace(one, machine=node.name) for one in report.places if _may_be_probed(one, node.origin))
            facts = replace(report.facts, machine=node.name)
            progress.reports[node.name] = replace(report, facts=facts, places=places[:_MAX_OWN_PLACES])
            progress.aheads[node.name] = header.clock - self._wall_clock()

    def probed(self, node: NodeRecord, header: Probed, buffers: Sequence[memoryview]) -> None:
        """Store a node's report on its links, unless it is too long. Raises BadFrame: the report is malformed."""
        if (progress := self._awaiting(node, header)) is not None and progress.has_room(buffers):
            progress.links[node.name] = decode_part(_only(buffers), LinksReport)

    def _awaiting(self, node: NodeRecord, header: Examined | Probed) -> _Progress | None:
        """Return the examination that awaits this report of a node; None if none does."""
        progress = self._of(header.number, node)
        if progress is None or node.name in (progress.reports if isinstance(header, Examined) else progress.links):
            return None
        return progress

    def is_of(self, peer: int) -> bool:
        """Return whether a connection waits for an examination."""
        return self._progress is not None and self._progress.peer == peer

    def disconnected(self, peer: int) -> None:
        """End the examination of a connection that is gone."""
        if self.is_of(peer):
            self._progress = None

    def tick(self, now: float) -> None:
        """Take the next step if it is due."""
        while not self._master_facts.empty():
            number, facts = self._master_facts.get()
            if self._progress is not None and self._progress.number == number:
                self._progress.master = facts
        progress = self._progress
        if progress is None:
            return
        if not progress.is_probing:
            is_complete = all(one.name in progress.reports or not one.is_present for one in progress.nodes)
            if (is_complete and progress.master is not None) or now >= progress.reports_until:
                self._probe(progress, now)
        elif all(one.name in progress.links or not one.is_present for one in progress.probing) or now >= progress.until:
            self._conclude(progress)

    def _probe(self, progress: _Progress, now: float) -> None:
        """Send every node that has reported the addresses of the others, beginning with the node after it."""
        progress.is_probing = True
        progress.probing = [one for one in progress.nodes if one.name in progress.reports]
        for number, node in enumerate(progress.probing):
            others = [*progress.probing[number + 1 :], *progress.probing[:number]][:_MAX_PLACES]
            places: list[Place] = [place for one in others for place in progress.reports[one.name].places]
            header = ProbeNodes(number=progress.number, seconds=max(0.0, progress.until - now))
            self._send(node.peer, header, (encode_part(places),))

    def _conclude(self, progress: _Progress) -> None:
        self._progress = None
        report = NodeReport(facts=progress.master) if progress.master is not None else None
        nodes = [ExaminedNode(name=MASTER, report=report)]
        for one in progress.nodes:
            links = progress.links.get(one.name, LinksReport())
            nodes.append(
                ExaminedNode(
                    name=one.name, report=progress.reports.get(one.name), ahead=progress.aheads.get(one.name, 0.0),
                    links=links, doing=progress.doing[one.name],
                )
            )  # fmt: skip
        self._send(progress.peer, NodesExamined(), (encode_part(Examination(nodes=tuple(nodes))),))

    def _look_here(self, number: int) -> None:
        self._master_facts.put((number, self._look()))

    def _of(self, number: int, node: NodeRecord) -> _Progress | None:
        """Return the examination that an answer belongs to, if it is in progress."""
        progress = self._progress
        return progress if progress is not None and progress.number == number and node in progress.nodes else None


def look_here(home: StateDir) -> MachineFacts:
    """Return the facts of the master's own machine."""
    return examine({"runs": home.runs}, machine=MASTER)


def is_of_this_machine(origin: str) -> bool:
    """Return whether a connection of `origin` (`Address.description`) comes from the master's own machine."""
    host = host_in(origin)
    return not host or is_loopback(host)


def _may_be_probed(place: Place, origin: str) -> bool:
    """Return whether the others should connect there: to a machine's address, but not to their own loopback."""
    try:
        address = ip_address(place.address)
    except ValueError:
        return False
    return (
        not ((address.is_loopback and not is_of_this_machine(origin)) or address.is_multicast or address.is_unspecified)
        and 0 < place.port < 2**16
    )


def _only(buffers: Sequence[Any]) -> Any:
    if len(buffers) != 1:
        raise BadFrame(f"a report is one buffer, got {len(buffers)}")
    return buffers[0]
