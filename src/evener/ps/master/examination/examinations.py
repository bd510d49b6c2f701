"""The master's part when the doctor looks at all nodes: ask them, tell each where the others listen, put it together.

asked -> every present node reports, or its time is up -> those that reported probe each other -> the command is told

One examination at a time. Nothing waits: what comes is noted, and `tick` looks whether the next step is due.
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
"""What the master's own machine is called among the nodes'."""
MOST_SECONDS = 20.0
"""That one examination may take, so that others come to theirs."""
_MOST_OWN_PLACES = 4
"""At which one node listens, so that none can send the others to many."""
_MOST_PLACES = 64
"""That a node is to connect to."""
_REPORT_SHARE = 0.6
"""Of the time, for machines and task; the rest is for the links."""


@dataclass
class _Underway:
    """An examination that is not over."""

    peer: int
    number: int
    reports_until: float
    until: float
    asked: list[NodeRecord]
    doing: dict[str, str]
    reports: dict[str, NodeReport] = field(default_factory=dict)
    aheads: dict[str, float] = field(default_factory=dict)
    links: dict[str, LinksReport] = field(default_factory=dict)
    probing: list[NodeRecord] = field(default_factory=list)
    is_probing: bool = False
    own: MachineFacts | None = None


class Examinations:
    """See the first lines.

    Args:
        nodes: all nodes.
        send: to connections.
        look: gives the facts of the master's own machine; called in a thread.
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
        self._own: queue.SimpleQueue[tuple[int, MachineFacts]] = queue.SimpleQueue()
        self._number = 0
        self._underway: _Underway | None = None

    def ask(
        self, peer: int, asked: ExamineNodes, buffers: Sequence[memoryview], submitter: str, busy_with: str, now: float
    ) -> None:
        """A command wants an examination.

        Args:
            peer: its connection.
            asked: see there.
            buffers: likewise.
            submitter: whose command it is.
            busy_with: name of the run in progress, if there is one.
            now: seconds, as for `tick`.

        Raises:
            BadFrame: its question cannot be understood.
        """
        question = replace(decode_part(buffers[0], TaskQuestion), submitter=submitter) if buffers else None
        reason = ""
        if self._underway is not None:
            reason = "another command has the nodes looked at at this moment: try again"
        elif question is not None and busy_with:
            reason = f"run {busy_with} goes on, and nodes load no other task meanwhile: wait, or leave --task out"
        if reason:
            self._send(peer, NodesExamined(reason=shown(reason)))
            return
        seconds = min(asked.seconds, MOST_SECONDS)
        self._number += 1
        here = self._nodes.present
        self._underway = _Underway(
            peer,
            self._number,
            now + _REPORT_SHARE * seconds,
            now + seconds,
            here,
            {one.name: one.doing for one in here},
        )
        threading.Thread(target=self._look_here, args=(self._number,), daemon=True, name="evener-examine").start()
        words = (encode_part(question), buffers[1]) if question is not None else ()
        for node in here:
            self._send(node.peer, Examine(number=self._number, seconds=seconds), words)

    def examined(self, node: NodeRecord, header: Examined, buffers: Sequence[memoryview]) -> None:
        """A node has looked at its machine. Raises BadFrame: it does not say what is due."""
        if (found := self._of(header.number, node)) is not None:
            report = decode_part(_only(buffers), NodeReport)
            own = tuple(replace(one, machine=node.name) for one in report.places if _may_be_probed(one, node.origin))
            facts = replace(report.facts, machine=node.name)
            found.reports[node.name] = replace(report, facts=facts, places=own[:_MOST_OWN_PLACES])
            found.aheads[node.name] = header.clock - self._wall_clock()

    def probed(self, node: NodeRecord, header: Probed, buffers: Sequence[memoryview]) -> None:
        """A node has tried to connect to the others. Raises BadFrame: it does not say what is due."""
        if (found := self._of(header.number, node)) is not None:
            found.links[node.name] = decode_part(_only(buffers), LinksReport)

    def is_of(self, peer: int) -> bool:
        """Whether a connection waits for an examination."""
        return self._underway is not None and self._underway.peer == peer

    def left(self, peer: int) -> None:
        """A connection is gone."""
        if self.is_of(peer):
            self._underway = None

    def tick(self, now: float) -> None:
        """Go on with what is due."""
        while not self._own.empty():
            number, facts = self._own.get()
            if self._underway is not None and self._underway.number == number:
                self._underway.own = facts
        found = self._underway
        if found is None:
            return
        if not found.is_probing:
            is_complete = all(one.name in found.reports or not one.is_present for one in found.asked)
            if (is_complete and found.own is not None) or now >= found.reports_until:
                self._probe(found, now)
        elif all(one.name in found.links or not one.is_present for one in found.probing) or now >= found.until:
            self._conclude(found)

    def _probe(self, found: _Underway, now: float) -> None:
        """Tell every node that has reported where the others listen, the next ones in the circle first."""
        found.is_probing = True
        found.probing = [one for one in found.asked if one.name in found.reports]
        for number, node in enumerate(found.probing):
            others = [*found.probing[number + 1 :], *found.probing[:number]][:_MOST_PLACES]
            places: list[Place] = [place for one in others for place in found.reports[one.name].places]
            header = ProbeNodes(number=found.number, seconds=max(0.0, found.until - now))
            self._send(node.peer, header, (encode_part(places),))

    def _conclude(self, found: _Underway) -> None:
        self._underway = None
        own = NodeReport(facts=found.own) if found.own is not None else None
        nodes = [ExaminedNode(name=MASTER, report=own)]
        for one in found.asked:
            links = found.links.get(one.name, LinksReport())
            nodes.append(
                ExaminedNode(
                    name=one.name, report=found.reports.get(one.name), ahead=found.aheads.get(one.name, 0.0),
                    links=links, doing=found.doing[one.name],
                )
            )  # fmt: skip
        self._send(found.peer, NodesExamined(), (encode_part(Examination(nodes=tuple(nodes))),))

    def _look_here(self, number: int) -> None:
        self._own.put((number, self._look()))

    def _of(self, number: int, node: NodeRecord) -> _Underway | None:
        """The examination that an answer belongs to, if it goes on."""
        found = self._underway
        return found if found is not None and found.number == number and node in found.asked else None


def look_here(home: StateDir) -> MachineFacts:
    """The facts of the master's own machine."""
    return examine({"runs": home.runs}, machine=MASTER)


def is_of_this_machine(origin: str) -> bool:
    """Whether a connection of `origin` (`Address.description`) comes from the master's own machine."""
    host = host_in(origin)
    return not host or is_loopback(host)


def _may_be_probed(place: Place, origin: str) -> bool:
    """Whether the others are to connect there: to an address of a machine, and not of their own loopback."""
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
