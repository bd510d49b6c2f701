"""What both ways of going on, in rounds and each at its own pace, do alike: members, leases, updates, answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from evener.sync.agreement import Agreement
from evener.sync.common import Common, Page
from evener.sync.cores import Cores
from evener.sync.flat import Flat
from evener.sync.intake import Intake
from evener.sync.leases import Leasing
from evener.sync.merge.stream import Merging, is_finite
from evener.sync.messages import Answer, Lease, Push, Reply, Tally, Update, Verdict
from evener.sync.pulls import Pulls
from evener.sync.snapshot import Snapshot
from evener.sync.speeds import Speeds
from evener.sync.workload import Workload

NOT_FINITE = "the contribution is not finite: there is a NaN or an infinity in it, or its sum with others overflows"


@dataclass
class Member:
    """A worker that is here.

    Attributes:
        name: of the worker.
        leases: that it has not answered, by number, the oldest first.
        answered: numbers of the leases that it answered last.
        done: turns that it has had, for the bound of staleness.
        is_up_to_date: whether it knows all that it was told; not so at first.
        has_heard_the_end: whether it was told that the run is over.
    """

    name: str
    leases: dict[int, Lease] = field(default_factory=dict)
    answered: deque[int] = field(default_factory=lambda: deque(maxlen=4))
    done: int = 0
    is_up_to_date: bool = False
    has_heard_the_end: bool = False


class Contribution(msgspec.Struct, frozen=True):
    """What a worker sent in return for a lease."""

    worker: str
    lease: Lease
    push: Push
    page: Page


class Judgement(msgspec.Struct, frozen=True):
    """What became of the contribution to lease `number`."""

    number: int
    verdict: Verdict
    reason: str = ""


@dataclass
class Core:
    """The parts of a server.

    Attributes:
        agreement: of all.
        workload: of the run.
        common: weights.
        leasing: of samples.
        speeds: of the workers.
        intake: of contributions.
        pulls: of weights.
        cores: that compute.
        merged: memory to merge into.
        quorum: workers that have to be here for work to begin or go on.
        members: who is here, by name, in the order in which they came.
        tallies: of everybody who ever was.
    """

    agreement: Agreement
    workload: Workload
    common: Common
    leasing: Leasing
    speeds: Speeds
    intake: Intake
    pulls: Pulls
    cores: Cores
    merged: Flat
    quorum: int = 1
    members: dict[str, Member] = field(default_factory=dict)
    tallies: dict[str, Tally] = field(default_factory=dict)

    def resume(self, snapshot: Snapshot) -> None:
        """Go on from `snapshot`, of which the weights are here already.

        Raises:
            InvalidFile: arrays of the optimiser are missing, or of another shape.
        """
        state = snapshot.state
        self.common.resume(state.num_updates, snapshot.optimiser)
        self.leasing.resume(state.stocks)
        self.speeds.resume(state.unit_seconds)
        self.tallies.update(state.tallies)

    def tally(self, worker: str) -> Tally:
        """The counts of `worker`."""
        return self.tallies.setdefault(worker, Tally())

    def is_over(self) -> bool:
        """Whether enough updates were made, or all samples used and every lease answered."""
        if self.workload.num_updates is not None and self.common.version >= self.workload.num_updates:
            return True
        is_busy = any(member.leases for member in self.members.values())
        return not is_busy and self.leasing.is_spent(list(self.members))

    def may_update(self, num_underway: int) -> bool:
        """Whether more updates are wanted than are under way."""
        most = self.workload.num_updates
        return most is None or self.common.version + num_underway < most

    def merging(self, contributions: Sequence[Flat], leases: Sequence[Lease]) -> Merging:
        """The mean of contributions, weighted by the samples of their leases, in the making."""
        return Merging(self.merged, contributions, [lease.num_samples for lease in leases], self.cores)

    def update(
        self, contributions: Sequence[Contribution], merging: Merging | None = None
    ) -> tuple[Update | None, dict[str, Judgement]]:
        """Update the common weights by the mean of contributions, and judge each.

        Args:
            contributions: of one or several workers; those that are not finite are left out.
            merging: of all these, if it has begun.

        Returns:
            What was done, None if nothing could be; and a judgement by worker.
        """
        kept = list(contributions)
        judged = {}
        while kept and (bad := self._merge(kept, merging)):
            for i in reversed(bad):
                judged[kept[i].worker] = self.refuse(kept[i].worker, kept[i].lease, NOT_FINITE)
                del kept[i]
            merging = None
        update = self._advance(kept) if kept else None
        judged |= {one.worker: Judgement(one.lease.number, "applied") for one in kept}
        for one in contributions:
            self.intake.reuse(one.page)
        return update, judged

    def refuse(self, worker: str, lease: Lease, reason: str) -> Judgement:
        """Count that a contribution is not taken: its samples are used up, or they might be refused for ever."""
        tally = self.tally(worker)
        tally.refused += 1
        tally.samples_refused += lease.num_samples
        return Judgement(lease.number, "refused", reason)

    def replies(self, judged: Mapping[str, Judgement], leases: Mapping[str, Sequence[Lease]]) -> list[Reply]:
        """Answers to all that were judged or get leases; to everybody, once, when the run is over."""
        is_over, replies = self.is_over(), []
        for name, member in self.members.items():
            is_news = is_over and not member.has_heard_the_end
            if name in judged or name in leases or is_news:
                replies += self._replies_to(member, judged.get(name), leases.get(name, ()), is_over)
        return replies

    def restate(self, member: Member, judgement: Judgement | None) -> list[Reply]:
        """Answers from which a worker that may have missed some knows all again."""
        self.pulls.forget(member.name)
        member.is_up_to_date = False
        return self._replies_to(member, judgement, tuple(member.leases.values()), self.is_over())

    def _merge(self, kept: Sequence[Contribution], merging: Merging | None) -> tuple[int, ...]:
        """Merge; returns which contributions have to be left out."""
        if len(kept) == 1:
            return () if is_finite(kept[0].page.flat, self.cores) else (0,)
        return (merging or self.merging([one.page.flat for one in kept], [one.lease for one in kept])).finish()

    def _advance(self, kept: Sequence[Contribution]) -> Update:
        staleness = {one.worker: self.common.version - one.lease.version for one in kept}
        self.common.update(kept[0].page.flat if len(kept) == 1 else self.merged)
        for one in kept:
            tally, stale = self.tally(one.worker), staleness[one.worker]
            tally.applied += 1
            tally.num_samples += one.lease.num_samples
            tally.staleness += stale
            tally.most_stale = max(tally.most_stale, stale)
        return Update(
            version=self.common.version,
            epoch=max(one.lease.samples.epoch for one in kept),
            num_samples=sum(one.lease.num_samples for one in kept),
            loss=_mean_loss(kept),
            staleness=staleness,
        )

    def _replies_to(
        self, member: Member, judgement: Judgement | None, leases: Sequence[Lease], is_over: bool
    ) -> list[Reply]:
        member.has_heard_the_end |= is_over
        contents = self.pulls.contents(member.name)
        first = Answer(
            version=self.common.version,
            answers=judgement.number if judgement else None,
            verdict=judgement.verdict if judgement else None,
            reason=judgement.reason if judgement else "",
            contents=contents.kind,
            base=contents.base,
            lease=leases[0] if leases else None,
            is_anew=not member.is_up_to_date,
            is_last=is_over,
        )
        member.is_up_to_date = True
        others = [Answer(version=self.common.version, lease=lease) for lease in leases[1:]]
        return [Reply(member.name, first, contents.image), *(Reply(member.name, other) for other in others)]


def _mean_loss(contributions: Sequence[Contribution]) -> float | None:
    """Over the samples of those that told a loss."""
    told = [(one.push.loss, one.lease.num_samples) for one in contributions if one.push.loss is not None]
    return sum(loss * n for loss, n in told) / sum(n for _, n in told) if told else None
