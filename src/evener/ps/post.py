"""Where a run puts what has to leave: it knows names, not sockets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from evener.events import RunEvent
from evener.ps.messages import Header
from evener.wire.frame import Buffer


class Post(Protocol):
    """See the first line."""

    def send(self, name: str, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        """Send to a node, if it has a connection."""
        ...

    def is_sending(self, name: str) -> bool:
        """Whether something is still on its way to a node."""
        ...

    def tell(self, word: RunEvent) -> None:
        """Tell whoever watches the run."""
        ...
