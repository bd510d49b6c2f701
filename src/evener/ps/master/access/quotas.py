"""How much peers may ask of a master, each and all together: nothing grows with what somebody says."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence

import msgspec

from evener.ps.protocol.blob import CHUNK_BYTES
from evener.ps.protocol.examination_messages import (
    MOST_CODE_BYTES,
    MOST_QUESTION_BYTES,
    MOST_REPORT_BYTES,
    Examined,
    ExamineNodes,
    Probed,
)
from evener.ps.protocol.messages import BlobChunk, Header
from evener.ps.protocol.rank_messages import (
    MOST_SHOWN,
    MOST_WORDS,
    RankPiece,
    RankSaid,
    RankShown,
)
from evener.records.profile import DeviceProfile
from evener.wire.errors import BadFrame
from evener.wire.limits import Limits
from evener.wire.server import Server

MOST_NAMES = 4096
"""Nodes that a master remembers."""
MOST_EVENTS = 10_000
"""That the record of a run keeps."""
MOST_EVENT_BYTES = 2**22
"""Of these, in memory."""
MOST_LOG_BYTES = 2**29
"""Of the file with the events of a run."""
MOST_PROFILE_BYTES = 5120
"""Of the profile of a node's device, as it travels."""
MOST_ARRIVING_BYTES = 2**26
"""Of buffers that are on their way from all peers together, besides weights and contributions."""
MOST_FETCHING = 64
"""Peers that have not taken the last piece of a blob that they asked for; others wait for theirs."""
IDLE_PATIENCES = 4.0
"""For which a connection may say nothing that is neither a node's nor watches a run."""
MOST_WAITING = 4
"""Frames that may wait for a peer which asks for another answer."""
MOST_FETCHES = 16
"""Pieces of blobs that a peer may ask for before it has taken the first."""
MOST_BUFFERS: dict[type[Header], tuple[int, ...]] = {
    BlobChunk: (CHUNK_BYTES,),
    ExamineNodes: (MOST_QUESTION_BYTES, MOST_CODE_BYTES),
    Examined: (MOST_REPORT_BYTES,),
    Probed: (MOST_REPORT_BYTES,),
    RankPiece: (CHUNK_BYTES,),
    RankSaid: (MOST_WORDS,),
    RankShown: (MOST_SHOWN,),
}
"""Bytes that each buffer of a message may have; all of them are there, or none."""
_OTHER_FILES = 128
"""Files that a master has open besides connections, at most."""


def require_size(kind: type[Header], lengths: Sequence[int]) -> None:
    """Raise BadFrame if nothing of that kind may bring buffers of these lengths."""
    most = MOST_BUFFERS.get(kind, ())
    if lengths and (len(lengths) != len(most) or any(own > one for own, one in zip(lengths, most, strict=True))):
        raise BadFrame(f"{kind.__name__} brings {sum(lengths)} bytes too many")


def require_room(server: Server[Header], peer: int) -> None:
    """Raise BadFrame if somebody asks for more answers than it takes."""
    if server.num_waiting(peer) >= MOST_WAITING:
        raise BadFrame(f"it asks for more than it takes: {MOST_WAITING} answers wait for it")


def require_small(profile: DeviceProfile | None) -> None:
    """Raise BadFrame if the profile of a device is larger than any that is measured when a node joins."""
    if profile is not None and len(msgspec.msgpack.encode(profile)) > MOST_PROFILE_BYTES:
        raise BadFrame(f"the profile of a device has at most {MOST_PROFILE_BYTES} bytes")


class Allowance:
    """So many bytes at once, and so many more with every second.

    Args:
        at_once: bytes.
        per_second: bytes.
        clock: seconds.
    """

    def __init__(self, at_once: int, per_second: int, clock: Callable[[], float]) -> None:
        self._most, self._per_second, self._clock = at_once, per_second, clock
        self._left, self._seen = float(at_once), clock()

    def take(self, num_bytes: int) -> bool:
        """Whether there are so many; they are taken then."""
        now = self._clock()
        self._left = min(float(self._most), self._left + (now - self._seen) * self._per_second)
        self._seen = now
        if num_bytes > self._left:
            return False
        self._left -= num_bytes
        return True


class Arrivals:
    """The buffers that are on their way to the master: no peer has memory made for more than all may have."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}

    def begin(self, peer: int, num_bytes: int) -> None:
        """A frame begins. Raises BadFrame: too much is on its way from all peers."""
        self._bytes.pop(peer, None)
        if num_bytes and sum(self._bytes.values()) + num_bytes > MOST_ARRIVING_BYTES:
            raise BadFrame("too much is on its way from others at this moment: try again")
        if num_bytes:
            self._bytes[peer] = num_bytes

    def end(self, peer: int) -> None:
        """It is here, or its connection is gone."""
        self._bytes.pop(peer, None)


def connection_limits(patience: float) -> Limits:
    """Limits of a server whose connections never take the files that the master itself needs."""
    usual, (files, _) = Limits(patience=patience), resource.getrlimit(resource.RLIMIT_NOFILE)
    room = usual.connections + usual.pending if files == resource.RLIM_INFINITY else max(4, files - _OTHER_FILES)
    pending = min(usual.pending, max(1, room // 4))
    return Limits(patience=patience, pending=pending, connections=min(usual.connections, max(1, room - pending)))
