"""How much peers may ask of a master, each and all together: nothing grows with what somebody says."""

from __future__ import annotations

import resource
from collections.abc import Sequence

from evener.ps.blobs.blob import CHUNK_BYTES
from evener.ps.collective.rank_messages import (
    MOST_RANK_JOB,
    MOST_SHOWN,
    MOST_WORDS,
    RankPiece,
    RankSaid,
    RankShown,
    SubmitRanks,
)
from evener.ps.examination.examination_messages import (
    MOST_CODE_BYTES,
    MOST_QUESTION_BYTES,
    MOST_REPORT_BYTES,
    Examined,
    ExamineNodes,
    Probed,
)
from evener.ps.messages import BlobChunk, FetchBlob, GetStatus, Header, WatchRun
from evener.wire.errors import BadFrame
from evener.wire.limits import Limits
from evener.wire.server import Server

MOST_NAMES = 4096
"""Nodes that a master remembers."""
MOST_EVENTS = 10_000
"""That the record of a run keeps."""
IDLE_PATIENCES = 4.0
"""For which a connection may say nothing that is neither a node's nor watches a run."""
MOST_WAITING: dict[type[Header], int] = {FetchBlob: 16, GetStatus: 4, WatchRun: 1, ExamineNodes: 1}
"""Frames that may wait for a peer which asks for more; a piece of a blob is a megabyte."""
MOST_WAITING_IN_ALL = 512
"""Frames that may wait for all peers together when one asks for a piece of a blob."""
MOST_BUFFERS: dict[type[Header], tuple[int, ...]] = {
    BlobChunk: (CHUNK_BYTES,),
    ExamineNodes: (MOST_QUESTION_BYTES, MOST_CODE_BYTES),
    Examined: (MOST_REPORT_BYTES,),
    Probed: (MOST_REPORT_BYTES,),
    RankPiece: (CHUNK_BYTES,),
    RankSaid: (MOST_WORDS,),
    RankShown: (MOST_SHOWN,),
    SubmitRanks: (MOST_RANK_JOB,),
}
"""Bytes that each buffer of a message may have; all of them are there, or none."""
_OTHER_FILES = 128
"""Files that a master has open besides connections, at most."""


def require_size(kind: type[Header], lengths: Sequence[int]) -> None:
    """Raise BadFrame if nothing of that kind may bring buffers of these lengths."""
    most = MOST_BUFFERS.get(kind, ())
    if lengths and (len(lengths) != len(most) or any(own > one for own, one in zip(lengths, most, strict=True))):
        raise BadFrame(f"{kind.__name__} brings {sum(lengths)} bytes too many")


def require_room(server: Server[Header], peer: int, most: int) -> None:
    """Raise BadFrame if somebody asks for more than it takes, or all do."""
    if server.num_waiting(peer) >= most:
        raise BadFrame(f"it asks for more than it takes: {most} answers wait for it")
    if server.num_waiting() >= MOST_WAITING_IN_ALL:
        raise BadFrame("too many answers wait for others to take them: try again")


def connection_limits(patience: float) -> Limits:
    """Limits of a server whose connections never take the files that the master itself needs."""
    usual, (files, _) = Limits(patience=patience), resource.getrlimit(resource.RLIMIT_NOFILE)
    room = usual.connections + usual.pending if files == resource.RLIM_INFINITY else max(4, files - _OTHER_FILES)
    pending = min(usual.pending, max(1, room // 4))
    return Limits(patience=patience, pending=pending, connections=min(usual.connections, max(1, room - pending)))
