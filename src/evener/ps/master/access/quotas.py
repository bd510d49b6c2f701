"""Quotas: limits on what one peer, and all peers together, can make a master store or send."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from evener.ps.protocol.blob import CHUNK_BYTES
from evener.ps.protocol.examination_messages import (
    MAX_CODE_BYTES,
    MAX_QUESTION_BYTES,
    MAX_REPORT_BYTES,
    Examined,
    ExamineNodes,
    Probed,
)
from evener.ps.protocol.messages import BlobChunk, Header
from evener.ps.protocol.rank_messages import (
    MAX_MESSAGE_BYTES,
    MAX_SHOWN_BYTES,
    RankPiece,
    RankSaid,
    RankShown,
)
from evener.records.profile import DeviceProfile
from evener.wire.errors import BadFrame
from evener.wire.identity import Role
from evener.wire.limits import Limits
from evener.wire.server import Server

MAX_NAMES = 4096
"""Limit of nodes that a master remembers."""
MAX_EVENTS = 10_000
"""Limit of events in the record of a run."""
MAX_EVENT_BYTES = 2**22
"""Limit of these events in memory."""
MAX_LOG_BYTES = 2**29
"""Limit of the file with the events of a run."""
MAX_PROFILE_BYTES = 5120
"""Limit of the encoded profile of a node's device."""
MAX_ARRIVING_BYTES: dict[Role, int] = {"node": 3 * 2**24, "submitter": 2**23, "admin": 2**23}
"""Limits of buffers that are arriving together, without weights and contributions: messages of nodes; commands."""
MAX_FETCHING = 64
"""Limit of peers that have not taken their last piece of a blob; other peers wait."""
IDLE_PATIENCES = 4.0
"""Patiences after which an idle connection is closed that is no node's and watches no run.

It is also the time within which a peer has to take a piece of a blob if others wait.
"""
MAX_WAITING = 4
"""Limit of frames in the queue of a peer that requests another answer."""
MAX_FETCHES = 16
"""Limit of a peer's open requests for pieces of blobs."""
MAX_BUFFER_BYTES: dict[type[Header], tuple[int, ...]] = {
    BlobChunk: (CHUNK_BYTES,),
    ExamineNodes: (MAX_QUESTION_BYTES, MAX_CODE_BYTES),
    Examined: (MAX_REPORT_BYTES,),
    Probed: (MAX_REPORT_BYTES,),
    RankPiece: (CHUNK_BYTES,),
    RankSaid: (MAX_MESSAGE_BYTES,),
    RankShown: (MAX_SHOWN_BYTES,),
}
"""Limit of each buffer of a message; a message has all of them, or none."""
_OTHER_FILES = 128
"""Limit of open files of a master besides connections."""


def require_size(kind: type[Header], lengths: Sequence[int]) -> None:
    """Raise BadFrame if a message of this kind must not have buffers of these lengths."""
    most = MAX_BUFFER_BYTES.get(kind, ())
    if lengths and (
        len(lengths) != len(most) or any(length > limit for length, limit in zip(lengths, most, strict=True))
    ):
        raise BadFrame(f"{kind.__name__} brings {sum(lengths)} bytes too many")


def require_room(server: Server[Header], peer: int) -> None:
    """Raise BadFrame if too many answers are waiting for a peer."""
    if server.num_waiting(peer) >= MAX_WAITING:
        raise BadFrame(f"too many requests: {MAX_WAITING} answers are waiting for this peer")


def require_small(profile: DeviceProfile | None) -> None:
    """Raise BadFrame if the profile of a device is larger than a measured one can be."""
    if profile is not None and len(msgspec.msgpack.encode(profile)) > MAX_PROFILE_BYTES:
        raise BadFrame(f"the profile of a device has at most {MAX_PROFILE_BYTES} bytes")


class Allowance:
    """A token bucket for bytes.

    Args:
        at_once: size of the bucket in bytes.
        per_second: bytes that are added per second.
        clock: seconds.
    """

    def __init__(self, at_once: int, per_second: int, clock: Callable[[], float]) -> None:
        self._most, self._per_second, self._clock = at_once, per_second, clock
        self._left, self._seen = float(at_once), clock()

    def take(self, num_bytes: int) -> bool:
        """Take so many bytes if there are as many; return whether there were."""
        now = self._clock()
        self._left = min(float(self._most), self._left + (now - self._seen) * self._per_second)
        self._seen = now
        if num_bytes > self._left:
            return False
        self._left -= num_bytes
        return True


class Arrivals:
    """Buffers that are arriving at the master: their total memory is limited, for each role by itself.

    A new frame always has room. The frames that have not moved for longest make room for it.

    Args:
        fail: closes the connection of a peer because of an error.
    """

    def __init__(self, fail: Callable[[int, Exception], None]) -> None:
        self._fail = fail
        self._bytes: dict[Role, dict[int, int]] = {role: {} for role in MAX_ARRIVING_BYTES}

    def begin(self, peer: int, num_bytes: int, role: Role) -> None:
        """Add the buffers of a frame, whose type messages of `role` have. Raises BadFrame: they are too large."""
        self.end(peer)
        bytes_of, most = self._bytes[role], MAX_ARRIVING_BYTES[role]
        if num_bytes > most:
            raise BadFrame(f"a message has at most {most} bytes, got {num_bytes}")
        while sum(bytes_of.values()) + num_bytes > most:
            slowest = next(iter(bytes_of))
            del bytes_of[slowest]
            self._fail(slowest, BadFrame("its message arrives too slowly, and messages of other peers need the memory"))
        if num_bytes:
            bytes_of[peer] = num_bytes

    def move(self, peer: int) -> None:
        """Note that a part of a frame has arrived."""
        for bytes_of in self._bytes.values():
            if (num_bytes := bytes_of.pop(peer, None)) is not None:
                bytes_of[peer] = num_bytes

    def end(self, peer: int) -> None:
        """Remove the buffers of a frame that has arrived, or whose connection is gone."""
        for bytes_of in self._bytes.values():
            bytes_of.pop(peer, None)


def connection_limits(patience: float) -> Limits:
    """Return limits on connections that leave the master enough files for its own use."""
    import resource  # masters run on systems that have it

    usual, (files, _) = Limits(patience=patience), resource.getrlimit(resource.RLIMIT_NOFILE)
    room = usual.connections + usual.pending if files == resource.RLIM_INFINITY else max(4, files - _OTHER_FILES)
    pending = min(usual.pending, max(1, room // 4))
    return Limits(patience=patience, pending=pending, connections=min(usual.connections, max(1, room - pending)))
