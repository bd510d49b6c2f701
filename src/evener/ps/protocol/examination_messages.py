"""Messages of `evener doctor` over a master: examine all nodes, and the links between them.

    command                 master                            node
    -------                 ------                            ----
      -- ExamineNodes --->    examines its own machine -- Examine --->  listens, examines its machine and the task
                              knows where each listens  <- Examined ---
                                                        -- ProbeNodes ->  connects to the others
                                                        <- Probed ------
      <- NodesExamined ---

Results travel in buffers, since the facts of a machine are longer than a header may be.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from evener.doctor.facts import MachineFacts
from evener.doctor.peers import DataFacts, Link, Unreached
from evener.ps.protocol.blob import CHUNK_BYTES
from evener.ps.protocol.messages import Header
from evener.records.decoding import decode_msgpack
from evener.records.schema import NOT_DECODED, Count, Digest, Finite, Name, Part, Seconds, Text, Word
from evener.wire.errors import BadFrame

MAX_REPORT_BYTES = 1 << 18
"""Limit of a node's report."""
MAX_QUESTION_BYTES = 1 << 16
MAX_CODE_BYTES = CHUNK_BYTES
"""Limit of the code of a task that is only loaded, not trained."""


class TaskQuestion(Part, frozen=True, kw_only=True):
    """A task that nodes load, with its data, without training.

    Attributes:
        task: name of a built-in task, or of a file in the blob `code`.
        code: blob with the task's files; empty for a built-in task.
        data_dir: where nodes without a `--data` of their own look for the data; empty if the task knows.
        options: options of the task, as text.
        submitter: name of the submitter at the master.
    """

    task: Name
    code: Digest = ""
    data_dir: Text = ""
    options: dict[Name, Text] = {}
    submitter: Word = ""


class Place(Part, frozen=True, kw_only=True):
    """An address at which a machine listens for a few seconds."""

    machine: Name
    address: Name
    port: Count


class NodeReport(Part, frozen=True, kw_only=True):
    """A node's report on its own machine.

    Attributes:
        facts: facts of the machine.
        places: addresses at which it listens for the others.
        data: data of the task, if there is a task and its data can be loaded.
    """

    facts: MachineFacts
    places: tuple[Place, ...] = ()
    data: DataFacts | None = None


class LinksReport(Part, frozen=True, kw_only=True):
    """The other nodes that a node can and cannot connect to."""

    links: tuple[Link, ...] = ()
    unreached: tuple[Unreached, ...] = ()


class ExaminedNode(Part, frozen=True, kw_only=True):
    """All results about a node, or about the master's own machine.

    Attributes:
        name: name of the node.
        report: report on its machine; None if it did not report in time.
        ahead: seconds by which its clock is ahead of the master's.
        links: links to the others.
        doing: activity of the node when the examination began.
    """

    name: Name
    report: NodeReport | None = None
    ahead: Finite = 0.0
    links: LinksReport = LinksReport()
    doing: Text = ""


class Examination(Part, frozen=True, kw_only=True):
    """The results: the master's own machine first, then all connected nodes."""

    nodes: tuple[ExaminedNode, ...]


class ExamineNodes(Header, frozen=True, kw_only=True):
    """A command asks for an examination of all nodes within `seconds`.

    It has no buffer, or two: a `TaskQuestion` and the stream of its code, which may be empty.
    """

    seconds: Seconds


class Examine(Header, frozen=True, kw_only=True):
    """The master asks a node to examine its machine; buffers as in `ExamineNodes`.

    Attributes:
        number: number of the examination, which answers repeat.
        seconds: longest time for which the node listens for the others.
    """

    number: Count
    seconds: Seconds


class Examined(Header, frozen=True, kw_only=True):
    """A node has examined its machine; one buffer: a `NodeReport`.

    Attributes:
        number: number of the examination.
        clock: seconds since 1970 on the node when it sent this.
    """

    number: Count
    clock: Finite


class ProbeNodes(Header, frozen=True, kw_only=True):
    """The master asks a node to connect to others within `seconds`; one buffer: their `Place`s."""

    number: Count
    seconds: Seconds


class Probed(Header, frozen=True, kw_only=True):
    """A node has tried to connect to the others; one buffer: a `LinksReport`."""

    number: Count


class NodesExamined(Header, frozen=True, kw_only=True):
    """The examination has ended; one buffer, an `Examination`, unless there is a `reason` why it was refused."""

    reason: Text = ""


T = TypeVar("T")


def decode_part(data: bytes | memoryview, kind: type[T]) -> T:
    """Decode a buffer. Raises BadFrame: it does not hold a `kind`."""
    try:
        return decode_msgpack(data, kind)
    except NOT_DECODED as error:
        raise BadFrame(f"no {kind.__name__}: {error}") from error


def encode_part(part: object) -> bytes:
    """Encode a buffer."""
    return msgspec.msgpack.encode(part)
