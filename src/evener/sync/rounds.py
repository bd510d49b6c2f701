"""Staleness 0: the weights change when all workers of a round have contributed, or are gone.

As many rounds are open at a time as a worker may have contributions under way: one, or two if communication overlaps
with work. They close in order. Who comes in between works from the next round on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from evener.sync.core import Contribution, Core, Judgement, Member
from evener.sync.flat import Flat
from evener.sync.merge.stream import Merging
from evener.sync.messages import Lease, Outcome


@dataclass
class Round:
    """One round.

    Attributes:
        leases: of its workers, by name, in the order in which contributions are summed; not of those that are gone.
        missing: workers that are still awaited.
        contributions: that came, by name.
        judged: what was refused, by name.
        arrived: bytes of each contribution that are here, by name.
        merging: of all contributions, begun while they arrive.
    """

    leases: dict[str, Lease]
    missing: set[str]
    contributions: dict[str, Contribution] = field(default_factory=dict)
    judged: dict[str, Judgement] = field(default_factory=dict)
    arrived: dict[str, int] = field(default_factory=dict)
    merging: Merging | None = None

    def leave_out(self, worker: str) -> None:
        """Do not wait for `worker` any longer, and merge anew without what has come of it."""
        self.missing.discard(worker)
        del self.leases[worker]
        self.merging = None


class Rounds:
    """Opens rounds and closes them.

    Args:
        core: of the server.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._rounds: deque[Round] = deque()

    def join(self, member: Member) -> Outcome:  # noqa: ARG002  # like the others of its kind
        """Somebody came."""
        return self._settle()

    def leave(self, member: Member) -> Outcome:
        """Somebody went; what it has contributed counts."""
        for one in self._rounds:
            if member.name in one.missing:
                one.leave_out(member.name)
        return self._settle()

    def contribute(self, contribution: Contribution) -> Outcome:
        """A contribution came."""
        one = self._round_of(contribution.worker, contribution.lease)
        one.contributions[contribution.worker] = contribution
        one.missing.discard(contribution.worker)
        return Outcome() if one.missing else self._settle()

    def refuse(self, member: Member, lease: Lease, reason: str) -> Outcome:
        """A contribution came that cannot be used."""
        one = self._round_of(member.name, lease)
        one.judged[member.name] = self._core.refuse(member.name, lease, reason)
        one.leave_out(member.name)
        return self._settle()

    def arrived(self, worker: str, lease: Lease, num_bytes: int) -> None:
        """So much of a contribution is here, 0 as it begins: merge what is here of all."""
        one = self._rounds[0]
        if one.leases.get(worker) is not lease:
            return
        if num_bytes < one.arrived.get(worker, 0):  # it comes again, perhaps other than before
            one.merging = None
        one.arrived[worker] = num_bytes
        least = min([self._num_bytes(one, name) for name in one.leases])
        if least > 0 and len(one.leases) > 1:
            self._merging(one).advance(least)

    def is_pending(self, number: int) -> bool:
        """Whether the contribution to lease `number` is kept for the end of its round."""
        return any(c.lease.number == number for one in self._rounds for c in one.contributions.values()) or any(
            judgement.number == number for one in self._rounds for judgement in one.judged.values()
        )

    def unmerged(self) -> list[tuple[str, Lease]]:
        """Leases whose contributions are kept for the end of their round, with their workers."""
        return [(c.worker, c.lease) for one in self._rounds for c in one.contributions.values()]

    def _round_of(self, worker: str, lease: Lease) -> Round:
        return next(one for one in self._rounds if one.leases.get(worker) is lease)

    def _num_bytes(self, one: Round, worker: str) -> int:
        """That are here of the contribution of `worker`."""
        return self._core.intake.num_bytes if worker in one.contributions else one.arrived.get(worker, 0)

    def _merging(self, one: Round) -> Merging:
        if one.merging is None:
            one.merging = self._core.merging([self._flat(one, name) for name in one.leases], list(one.leases.values()))
        return one.merging

    def _flat(self, one: Round, worker: str) -> Flat:
        """Where the contribution of `worker` is, or arrives."""
        here = one.contributions.get(worker)
        return (here.page if here else self._core.intake.page(worker)).flat

    def _settle(self) -> Outcome:
        """Close what is complete, open what can be opened, and say so."""
        outcome = Outcome()
        if not self._rounds or self._rounds[0].missing:
            outcome.replies += self._core.replies({}, self._open_rounds())
        while self._rounds and not self._rounds[0].missing:
            one = self._rounds.popleft()
            update, judged = self._core.update(self._in_order(one), one.merging)
            outcome.updates += [update] if update else []
            outcome.replies += self._core.replies(one.judged | judged, self._open_rounds())
        return outcome

    def _in_order(self, one: Round) -> list[Contribution]:
        return [one.contributions[name] for name in one.leases]

    def _open_rounds(self) -> dict[str, list[Lease]]:
        """Open as many rounds as may be open; returns the new leases by worker, the oldest first."""
        found: dict[str, list[Lease]] = {}
        while self._may_open():
            leases = self._core.leasing.divide(self._core.common.version, list(self._core.members))
            if not leases:
                break
            self._rounds.append(Round(leases, set(leases)))
            for name, lease in leases.items():
                self._core.members[name].leases[lease.number] = lease
                found.setdefault(name, []).append(lease)
        return found

    def _may_open(self) -> bool:
        core, num_open = self._core, len(self._rounds)
        has_quorum = len(core.members) >= max(1, core.quorum)
        return has_quorum and num_open < core.agreement.depth and core.may_update(num_open)
