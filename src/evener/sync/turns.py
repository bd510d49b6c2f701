"""Staleness above 0: each contribution changes the weights as soon as it comes, and its worker goes on.

With a bound s nobody begins who has had, or has begun, more than s turns more than the slowest has finished. The
slowest may always begin, so somebody always goes on.
"""

from __future__ import annotations

from evener.sync.core import Contribution, Core, Judgement, Member
from evener.sync.messages import Lease, Outcome


class Turns:
    """Lets everybody go on, within the bound.

    Args:
        core: of the server.
    """

    def __init__(self, core: Core) -> None:
        self._core = core

    def join(self, member: Member) -> Outcome:
        """Somebody came, and counts as having had as many turns as the slowest."""
        others = [other.done for other in self._core.members.values() if other is not member]
        member.done = min(others, default=0)
        return self._go_on({})

    def leave(self, member: Member) -> Outcome:  # noqa: ARG002  # like the others of its kind
        """Somebody went."""
        return self._go_on({})

    def contribute(self, contribution: Contribution) -> Outcome:
        """A contribution came: apply it."""
        update, judged = self._core.update([contribution])
        outcome = self._next(self._core.members[contribution.worker], judged)
        outcome.updates += [update] if update else []
        return outcome

    def refuse(self, member: Member, lease: Lease, reason: str) -> Outcome:
        """A contribution came that cannot be used; its worker has had its turn."""
        return self._next(member, {member.name: self._core.refuse(member.name, lease, reason)})

    def arrived(self, worker: str, lease: Lease, num_bytes: int) -> None:
        """Nothing can be done before all is here."""

    def is_pending(self, number: int) -> bool:  # noqa: ARG002
        """Nothing is kept."""
        return False

    def unmerged(self) -> list[tuple[str, Lease]]:
        """Nothing is kept."""
        return []

    def _next(self, member: Member, judged: dict[str, Judgement]) -> Outcome:
        member.done += 1
        return self._go_on(judged)

    def _go_on(self, judged: dict[str, Judgement]) -> Outcome:
        """Give out whatever work may be begun, to the slowest first, and say so."""
        found: dict[str, list[Lease]] = {}
        for member in sorted(self._core.members.values(), key=lambda one: one.done):
            while self._may_begin(member) and (lease := self._lease(member)):
                member.leases[lease.number] = lease
                found.setdefault(member.name, []).append(lease)
        return Outcome(replies=self._core.replies(judged, found))

    def _lease(self, member: Member) -> Lease | None:
        core = self._core
        return core.leasing.lease_one(core.common.version, member.name, list(core.members))

    def _may_begin(self, member: Member) -> bool:
        core, bound = self._core, self._core.agreement.staleness
        if len(member.leases) >= core.agreement.depth or len(core.members) < core.quorum:
            return False
        if not core.may_update(sum(len(other.leases) for other in core.members.values())):
            return False
        return bound is None or member.done + len(member.leases) - self._slowest() <= bound

    def _slowest(self) -> int:
        """Fewest turns of anybody who has, or could get, work."""
        core = self._core
        return min((one.done for one in core.members.values() if one.leases or core.leasing.left(one.name)), default=0)
