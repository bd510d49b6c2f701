"""What commands, master and nodes tell each other when the doctor looks at all nodes and at the links between them.

    command                 master                            node
    -------                 ------                            ----
      -- ExamineNodes --->    looks at its own machine  -- Examine --->  listens, looks at its machine and the task
                              knows where each listens  <- Examined ---
                                                        -- ProbeNodes ->  connects to the others
                                                        <- Probed ------
      <- NodesExamined ---

What they find travels in buffers, for the facts of a machine are longer than a header may be.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from evener.doctor.facts import MachineFacts
from evener.doctor.peers import DataFacts, Link, Unreached
from evener.ps.protocol.blob import CHUNK_BYTES
from evener.ps.protocol.messages import Header
from evener.records.schema import NOT_DECODED, Count, Digest, Finite, Name, Part, Seconds, Text, Word
from evener.wire.errors import BadFrame

MOST_REPORT_BYTES = 1 << 18
"""Of what a node finds."""
MOST_QUESTION_BYTES = 1 << 16
MOST_CODE_BYTES = CHUNK_BYTES
"""Of a task whose files travel only to be tried."""


class TaskQuestion(Part, frozen=True, kw_only=True):
    """A task that nodes are to load, with its data, without training anything.

    Attributes:
        task: name of a built-in task, or of a file in the blob `code`.
        code: blob with the task's files; empty for a built-in task.
        data_dir: where nodes without a `--data` of their own look for the data; empty if the task knows.
        options: of the task, as text.
        submitter: who asks, as the master knows him.
    """

    task: Name
    code: Digest = ""
    data_dir: Text = ""
    options: dict[Name, Text] = {}
    submitter: Word = ""


class Place(Part, frozen=True, kw_only=True):
    """Where a machine listens for a few seconds."""

    machine: Name
    address: Name
    port: Count


class NodeReport(Part, frozen=True, kw_only=True):
    """What a node finds at its own machine.

    Attributes:
        facts: of the machine.
        places: at which it listens for the others.
        data: of the task, if one was asked for and can be loaded.
    """

    facts: MachineFacts
    places: tuple[Place, ...] = ()
    data: DataFacts | None = None


class LinksReport(Part, frozen=True, kw_only=True):
    """Which of the others a node can connect to, and which not."""

    links: tuple[Link, ...] = ()
    unreached: tuple[Unreached, ...] = ()


class ExaminedNode(Part, frozen=True, kw_only=True):
    """All that is known of a node, or of the master's own machine.

    Attributes:
        name: of the node.
        report: of its machine; None if it said nothing in time.
        ahead: seconds by which its clock is ahead of the master's.
        links: to the others.
        doing: in words, when it was asked.
    """

    name: Name
    report: NodeReport | None = None
    ahead: Finite = 0.0
    links: LinksReport = LinksReport()
    doing: Name = ""


class Examination(Part, frozen=True, kw_only=True):
    """What was found: of the master's own machine first, then of all nodes that are here."""

    nodes: tuple[ExaminedNode, ...]


class ExamineNodes(Header, frozen=True, kw_only=True):
    """A command wants all nodes looked at, within so many seconds.

    No buffer; or two, a `TaskQuestion` and the stream of its code, which may be empty.
    """

    seconds: Seconds


class Examine(Header, frozen=True, kw_only=True):
    """The master wants a node to look at its machine; buffers as of `ExamineNodes`.

    Attributes:
        number: of the examination; answers bear it.
        seconds: for which the node listens for the others, at most.
    """

    number: Count
    seconds: Seconds


class Examined(Header, frozen=True, kw_only=True):
    """A node has looked at its machine; one buffer: a `NodeReport`.

    Attributes:
        number: of the examination.
        clock: seconds since 1970 on the node, as this is sent.
    """

    number: Count
    clock: Finite


class ProbeNodes(Header, frozen=True, kw_only=True):
    """A node is to connect to others within so many seconds; one buffer: their `Place`s."""

    number: Count
    seconds: Seconds


class Probed(Header, frozen=True, kw_only=True):
    """A node has tried to connect to the others; one buffer: a `LinksReport`."""

    number: Count


class NodesExamined(Header, frozen=True, kw_only=True):
    """All nodes were looked at; one buffer: an `Examination`, unless there was a reason not to look."""

    reason: Text = ""


T = TypeVar("T")


def decode_part(data: bytes | memoryview, kind: type[T]) -> T:
    """What is in a buffer. Raises BadFrame: it is none of its kind."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except NOT_DECODED as error:
        raise BadFrame(f"no {kind.__name__}: {error}") from error


def encode_part(part: object) -> bytes:
    """A buffer."""
    return msgspec.msgpack.encode(part)
