"""Where the bytes of a frame go while they arrive, and what they set off before the frame is read on.

A contribution is dealt with the moment its last byte is here: a node that overlaps communication with work may have the
next one right behind it, for the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from evener.ps.blob import CHUNK_BYTES
from evener.ps.consequences import Consequences
from evener.ps.employer import Employer
from evener.ps.members import Members
from evener.ps.messages import BlobChunk, Contribution, Header, SubmitRun
from evener.wire.errors import BadFrame
from evener.wire.frame import Buffer, allocate


class Landing:
    """See the first line.

    Args:
        members: who may contribute.
        employer: whose run has memory for contributions.
        consequences: of having heard, and of contributions.
    """

    def __init__(self, members: Members, employer: Employer, consequences: Consequences) -> None:
        self._members, self._employer, self._consequences = members, employer, consequences
        self._lengths: dict[int, int] = {}

    def place(self, peer: int, header: Header, lengths: tuple[int, ...]) -> Sequence[Buffer] | None:
        """Memory for the buffers of a frame; None if nobody wants them.

        Raises:
            BadFrame: nothing of that kind may bring so much, or not from there.
        """
        if isinstance(header, Contribution):
            return self._place_contribution(peer, header, lengths)
        is_blob = isinstance(header, BlobChunk) and sum(lengths) <= CHUNK_BYTES
        if lengths and not is_blob and not isinstance(header, SubmitRun):
            raise BadFrame(f"{type(header).__name__} brings {sum(lengths)} bytes too many")
        return allocate(header, lengths)

    def on_part(self, peer: int, header: Header, received: int) -> None:
        """So many bytes of a frame's buffers are here."""
        member, run = self._members.at(peer), self._employer.run
        if member is None:
            return
        self._consequences.of_hearing(member)
        if not isinstance(header, Contribution) or run is None:
            return
        if received < self._lengths[peer]:
            run.arrived(member.name, header, received)
        else:
            run.contribute(member.name, header, received)
            self._consequences.of_work()

    def is_dealt_with(self, peer: int, header: Header) -> bool:
        """Whether this frame, which is whole now, had bytes and was therefore dealt with when the last one came."""
        return isinstance(header, Contribution) and self._lengths.get(peer, 0) > 0

    def forget(self, peer: int) -> None:
        """A connection is gone."""
        self._lengths.pop(peer, None)

    def _place_contribution(
        self, peer: int, header: Contribution, lengths: tuple[int, ...]
    ) -> Sequence[Buffer] | None:  # fmt: skip
        self._lengths[peer] = sum(lengths)
        member, run = self._members.at(peer), self._employer.run
        if member is None:
            raise BadFrame("it has to join first")
        if run is None or len(lengths) != 1:
            return None
        inbox = run.inbox(member.name, header, lengths[0])
        return None if inbox is None else (inbox,)
