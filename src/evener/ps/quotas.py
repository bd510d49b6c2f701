"""How much peers may ask of a master, each and all together: nothing grows with what somebody says."""

from __future__ import annotations

import resource

from evener.ps.messages import FetchBlob, GetStatus, Header, WatchRun
from evener.wire.frame import Limits

MOST_NAMES = 4096
"""Nodes that a master remembers."""
MOST_EVENTS = 10_000
"""That the record of a run keeps."""
IDLE_PATIENCES = 4.0
"""For which a connection may say nothing that is neither a node's nor watches a run."""
MOST_WAITING: dict[type[Header], int] = {FetchBlob: 16, GetStatus: 4, WatchRun: 1}
"""Frames that may wait for a peer which asks for more; a piece of a blob is a megabyte."""
MOST_WAITING_IN_ALL = 512
"""Frames that may wait for all peers together when one asks for a piece of a blob."""
_OTHER_FILES = 128
"""Files that a master has open besides connections, at most."""


def connection_limits(patience: float) -> Limits:
    """Limits of a server whose connections never take the files that the master itself needs."""
    usual, (files, _) = Limits(patience=patience), resource.getrlimit(resource.RLIMIT_NOFILE)
    room = usual.connections + usual.pending if files == resource.RLIM_INFINITY else max(4, files - _OTHER_FILES)
    pending = min(usual.pending, max(1, room // 4))
    return Limits(patience=patience, pending=pending, connections=min(usual.connections, max(1, room - pending)))
