"""The common part of synchronous and asynchronous servers: members, updates of the weights, answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from evener.agreements.compression import Bytes, compressor_for
from evener.agreements.data_assigner import DataAssigner
from evener.agreements.layout import Flat, StateLayout
from evener.agreements.messages import Answer, Judgement, Lease, Update, WorkerReply
from evener.agreements.outlier_detection import OutlierDetector
from evener.agreements.part_assigner import PartAssigner
from evener.agreements.robust import NormClipper, merge_robustly
from evener.agreements.settings import AgreementSettings, Compression, Workload
from evener.agreements.snapshot import Snapshot
from evener.agreements.threads import BLOCK_BYTES, ThreadPool
from evener.agreements.update import Merging, is_finite
from evener.agreements.weights import Broadcast, Buffer, BufferPool, CommonWeights
from evener.agreements.worker_record import SpeedEstimate, WorkerRecord

WholeMerge = Callable[[Flat, Sequence[Flat], Sequence[float]], None]
"""Merges contributions that have all arrived, with weights, and their counters."""

NOT_FINITE = "the contribution is not finite: it contains NaN or infinity, or its sum with others overflows"
OUTLIER = "the contribution is far longer than usual, or is long and points away from all others"


class Received(msgspec.Struct, frozen=True):
    """A contribution that has arrived.

    Attributes:
        worker: its worker.
        lease: lease that it answers.
        num_samples: samples of the lease.
        seconds: believed seconds of the work.
        loss: mean over the samples, if it is known.
        page: memory of the contribution.
        num_bytes: number of bytes received.
        unused: indices in the layout of parameters that it did not reach.
    """

    worker: WorkerRecord
    lease: Lease
    num_samples: int
    seconds: float
    loss: float | None
    page: Buffer
    num_bytes: int
    unused: frozenset[int] = frozenset()


class Aggregator:
    """The parts of a server.

    Args:
        agreement: settings of the agreement.
        workload: workload of the run.
        weights: initial weights.
        cores: threads that compute.
        first_number: number before the first lease.
        quorum: workers that have to be present for work to begin or continue.
        merge: merges contributions; None: one pass over memory on `cores`, of means while they arrive if possible.

    Attributes:
        common: common weights.
        assigner: assigns samples.
        buffers: memory for arriving contributions.
        broadcast: encodes weights for the workers.
        workers: all workers that ever joined, by name.
        members: present workers, in the order in which they joined.
        staying: those of them that may get further work.
        is_paused: whether no further work may begin; work in progress continues.
    """

    def __init__(
        self,
        agreement: AgreementSettings,
        workload: Workload,
        weights: Flat,
        cores: ThreadPool,
        first_number: int,
        quorum: int,
        merge: WholeMerge | None = None,
    ) -> None:
        self.agreement, self.workload, self.quorum = agreement, workload, quorum
        self.common = CommonWeights(weights, agreement.outer, cores, agreement.clip_norm)
        kind = PartAssigner if workload.parts else DataAssigner
        self.assigner: DataAssigner | PartAssigner = kind(agreement, workload, first_number)
        is_streamed = agreement.robust == "mean" and merge is None  # else merging waits for all contributions
        self.buffers = ReceiveBuffers(
            weights.layout, agreement.push, cores, agreement.slow_link, is_streamed=is_streamed
        )
        self.broadcast = Broadcast(agreement, self.common, cores)
        self.workers: dict[str, WorkerRecord] = {}
        self.members: list[WorkerRecord] = []
        self.staying: list[WorkerRecord] = []
        self.is_paused = False
        self._epoch = 0
        self._merged, self._cores, self._whole_merge = Flat(weights.layout), cores, merge
        self._clipper = NormClipper() if agreement.robust == "clip" else None
        self._outliers = OutlierDetector()
        self._is_mean = agreement.robust in ("mean", "clip")

    def resume(self, snapshot: Snapshot) -> None:
        """Continue from `snapshot`, whose weights are set already.

        Raises:
            InvalidFile: arrays of the optimizer are missing, or of another shape.
        """
        state = snapshot.state
        self.common.resume(state.num_updates, snapshot.optimiser)
        self.broadcast.resume(snapshot.optimiser)
        self.assigner.resume(state.cursor)
        for name, totals in state.totals.items():
            speed = SpeedEstimate(state.unit_seconds.get(name))
            speed.fixed_samples = state.fixed_samples.get(name)
            self.workers[name] = WorkerRecord(name, speed, totals)
        self.assigner.use_measurements(self.workers.values())

    def is_over(self) -> bool:
        """Return whether enough updates were made, or all samples used and every lease answered."""
        if self.workload.num_updates is not None and self.common.version >= self.workload.num_updates:
            return True
        for member in self.members:
            if member.leases:
                return False
        return self.assigner.num_remaining == 0

    def may_update(self, num_underway: int) -> bool:
        """Return whether more updates are needed than are in progress, and may begin."""
        if self.is_paused:
            return False
        most = self.workload.num_updates
        return most is None or self.common.version + num_underway < most

    def merging(self, contributions: Sequence[Flat], num_samples: Sequence[int]) -> Merging:
        """Return a new weighted mean of contributions, by their samples."""
        return Merging(self._merged, contributions, num_samples, self._cores)

    def update(
        self, contributions: Sequence[Received], merging: Merging | None = None
    ) -> tuple[Update | None, dict[str, Judgement]]:
        """Update the common weights by the mean of contributions, and judge each.

        Args:
            contributions: contributions of one or several workers; outliers and those that are not finite are left out.
            merging: mean of all of them, if it has begun.

        Returns:
            The update, None if there is none; and a judgement by worker.
        """
        accepted, judged = list(contributions), dict[str, Judgement]()
        if self._remove_outliers(accepted, judged):
            merging = None
        if self._clipper is not None:
            self._clip(self._clipper, accepted)
        while accepted and (bad := self._merge(accepted, merging)):
            for i in reversed(bad):
                judged[accepted[i].worker.name] = self.refuse(accepted[i].worker, accepted[i].lease, NOT_FINITE)
                del accepted[i]
            merging = None
        update = self._advance(accepted) if accepted else None
        for one in accepted:
            judged[one.worker.name] = Judgement(
                one.worker.name, one.lease.number, "applied", "", one.lease, one.num_samples, one.seconds,
                num_bytes=one.num_bytes,
            )  # fmt: skip
        for one in contributions:
            self.buffers.reuse(one.page)
        return update, judged

    def refuse(self, worker: WorkerRecord, lease: Lease, reason: str, *, expels: bool = False) -> Judgement:
        """Count a refused contribution; its samples are used up, since they might be refused for ever."""
        num_samples = lease.num_samples
        worker.totals.refused += 1
        worker.totals.samples_refused += num_samples
        return Judgement(worker.name, lease.number, "refused", reason, lease, num_samples, expels=expels)

    def replies(self, judged: Mapping[str, Judgement], leases: Mapping[str, Sequence[Lease]]) -> list[WorkerReply]:
        """Return answers to all workers that were judged or get leases; to every worker, once, when the run is over."""
        is_over, replies = self.is_over(), list[WorkerReply]()
        for member in self.members:
            judgement, more = judged.get(member.name), leases.get(member.name, ())
            if judgement is not None or more or (is_over and not member.knows_the_end):
                self._reply(replies, member, judgement, more, is_over)
        return replies

    def resend(self, member: WorkerRecord, judgement: Judgement | None) -> list[WorkerReply]:
        """Return answers from which a worker that may have missed some knows everything again."""
        self.broadcast.forget(member.name)
        member.is_up_to_date = False
        replies: list[WorkerReply] = []
        self._reply(replies, member, judgement, tuple(member.leases.values()), self.is_over())
        return replies

    def _merge(self, contributions: Sequence[Received], merging: Merging | None) -> tuple[int, ...]:
        """Merge; return which contributions have to be left out."""
        if len(contributions) == 1:
            return () if is_finite(contributions[0].page.flat, self._cores) else (0,)
        if not self._is_mean:
            return self._merge_robustly([one.page.flat for one in contributions])
        if self._whole_merge is not None:
            return self._merge_at_once(self._whole_merge, contributions)
        merging = merging or self.merging(
            [one.page.flat for one in contributions], [one.num_samples for one in contributions]
        )
        return merging.finish()

    def _merge_at_once(self, merge: WholeMerge, contributions: Sequence[Received]) -> tuple[int, ...]:
        flats = [one.page.flat for one in contributions]
        merge(self._merged, flats, [float(one.num_samples) for one in contributions])
        if is_finite(self._merged, self._cores):
            return ()
        bad = tuple([i for i, flat in enumerate(flats) if not is_finite(flat, self._cores)])
        return bad or tuple(range(len(flats)))

    def _merge_robustly(self, flats: Sequence[Flat]) -> tuple[int, ...]:
        bad = tuple([i for i, flat in enumerate(flats) if not is_finite(flat, self._cores)])
        if bad:
            return bad
        if self._whole_merge is None:
            merge_robustly(self.agreement.robust, self._merged, flats, self._cores)
        else:
            self._whole_merge(self._merged, flats, [1.0] * len(flats))
        return ()

    def _remove_outliers(self, contributions: list[Received], judged: dict[str, Judgement]) -> bool:
        """Remove outliers from the contributions, and judge them; return whether there were any."""
        outliers = self._outliers.examine([(one.worker.name, one.page.flat, one.num_samples) for one in contributions])
        for i in reversed(outliers):
            one = contributions.pop(i)
            expels = self._outliers.is_faulty(one.worker.name)
            judged[one.worker.name] = self.refuse(one.worker, one.lease, OUTLIER, expels=expels)
        return bool(outliers)

    def _clip(self, clipper: NormClipper, contributions: Sequence[Received]) -> None:
        """Shorten contributions that are much longer than usual; those that are not finite are refused later."""
        for one in contributions:
            if clipper.clip(one.page.flat) < 1:
                one.worker.totals.clipped += 1

    def _advance(self, contributions: Sequence[Received]) -> Update:
        version, staleness = self.common.version, dict[str, int]()
        is_gradient = self.agreement.contribution == "gradient"
        unused = frozenset.intersection(*(one.unused for one in contributions)) if is_gradient else frozenset()
        self.broadcast.update(contributions[0].page.flat if len(contributions) == 1 else self._merged, unused)
        epoch, num_samples, known = self._epoch if self.agreement.skips_late else 0, 0, 0
        loss = 0.0
        for one in contributions:
            totals, n = one.worker.totals, one.num_samples
            stale = staleness[one.worker.name] = version - one.lease.version
            totals.applied += 1
            totals.num_samples += n
            totals.staleness += stale
            totals.most_stale = max(totals.most_stale, stale)
            epoch, num_samples = max(epoch, one.lease.samples.epoch), num_samples + n
            if one.loss is not None:
                loss, known = loss + one.loss * n, known + n
        self._epoch = epoch
        return Update(
            version=version + 1,
            epoch=epoch,
            num_samples=num_samples,
            loss=loss / known if known else None,
            staleness=staleness,
        )

    def _reply(
        self,
        replies: list[WorkerReply],
        member: WorkerRecord,
        judgement: Judgement | None,
        leases: Sequence[Lease],
        is_over: bool,
    ) -> None:
        """Append the answers to one worker."""
        member.knows_the_end |= is_over
        is_slow_link, version = member.slow_since is not None, self.common.version
        pull = self.broadcast.pull(member.name, is_slow_link=is_slow_link)
        compression = self.agreement.slow_link if is_slow_link else "none"
        answer = Answer(
            version=version,
            answers=judgement.number if judgement else None,
            verdict=judgement.verdict if judgement else None,
            reason=judgement.reason if judgement else "",
            contents=pull.kind,
            base=pull.base,
            lease=leases[0] if leases else None,
            resets_leases=not member.is_up_to_date,
            is_last=is_over,
            compression=compression,
            unused=pull.unused,
        )
        member.is_up_to_date = True
        replies.append(WorkerReply(member.name, answer, pull.image))
        for lease in leases[1:]:
            replies.append(WorkerReply(member.name, Answer(version=version, lease=lease, compression=compression)))


class ReceiveBuffers:
    """Memory for arriving contributions, one per worker.

    Args:
        layout: layout of the weights.
        compression: compression of the contributions.
        cores: threads that unpack them.
        slow_link: compression of contributions over slow links.
        is_streamed: whether they may be merged while they arrive.

    Attributes:
        num_bytes: exact size of a contribution.
        slow_link_bytes: exact size of one over a slow link.
        comes_in_parts: whether parts can be merged before the rest has arrived; less than a block never is.
    """

    def __init__(
        self,
        layout: StateLayout,
        compression: Compression,
        cores: ThreadPool,
        slow_link: Compression = "none",
        *,
        is_streamed: bool = True,
    ) -> None:
        self._packing = compressor_for(layout, compression, cores)
        self._for_slow_link = compressor_for(layout, slow_link, cores)
        self._pool = BufferPool(layout)
        self._pages: dict[str, Buffer] = {}
        self._images: dict[str, Bytes] = {}
        self.num_bytes = layout.num_bytes if self._packing is None else self._packing.num_bytes
        self.slow_link_bytes = self.num_bytes if self._for_slow_link is None else self._for_slow_link.num_bytes
        self.comes_in_parts = is_streamed and self._packing is None and self.num_bytes > BLOCK_BYTES

    def fits(self, num_bytes: int, *, is_slow_link: bool) -> bool:
        """Return whether a contribution may have this size; one that was begun before a worker sends less is whole."""
        return num_bytes == self.num_bytes or (is_slow_link and num_bytes == self.slow_link_bytes)

    def open(self, worker: str, num_bytes: int | None = None) -> memoryview:
        """Return memory for the next `num_bytes` of `worker`, which nothing else writes to."""
        if worker in self._pages or worker in self._images:  # whose memory may still be in use
            self.forget(worker)
        if self._packing is None and num_bytes in (None, self.num_bytes):
            return self.page(worker).lend()
        self._images[worker] = np.empty(num_bytes or self.num_bytes, np.uint8)
        return self._images[worker].data

    def is_packed(self, worker: str) -> bool:
        """Return whether the contribution of `worker` has to be unpacked when it is complete."""
        return worker in self._images

    def page(self, worker: str) -> Buffer:
        """Return the memory into which the contribution of `worker` arrives, or is unpacked."""
        page = self._pages.get(worker)
        if page is None:
            page = self._pages[worker] = self._pool.take()
        return page

    def take(self, worker: str) -> Buffer:
        """Return the contribution that has arrived from `worker`; return it to `reuse` afterwards."""
        if (packing := self._packing or self._for_slow_link) is not None and worker in self._images:
            packing.unpack(self._images.pop(worker), self.page(worker).flat)
        return self._pages.pop(worker)

    def reuse(self, page: Buffer) -> None:
        """Take back the memory of a merged contribution."""
        self._pool.put_back(page)

    def leave(self, worker: str) -> None:
        """Drop the arriving contribution of a worker that is gone, and the memory that is not in use."""
        self.forget(worker)
        self._pool.clear()

    def forget(self, worker: str) -> None:
        """Drop the arriving contribution of `worker`."""
        self._images.pop(worker, None)
        page = self._pages.pop(worker, None)
        if page is not None:
            self._pool.put_back(page)
