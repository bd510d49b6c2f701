"""Operations of Gloo's that another thread can end: a rank leaves those whose other ranks are gone, and computes on.

A collective of Gloo's cannot be left: to wait for it, to abort it or to destroy its group blocks as long as a silent
peer is silent. So nobody waits for it here, but for a future of our own, which its end or `abort` fulfils, whichever is
first. What was left may still be under way, and a peer that wakes up writes into its tensors: these, and the group, are
kept until it ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evener.comm.signed_store import SignedStore
from evener.records.errors import NodeLost

Pending = torch.futures.Future[Any]


@dataclass(frozen=True, kw_only=True)
class GlooPlace:
    """Where ranks meet for a process group of Gloo's.

    Attributes:
        store: a part of it that nobody else uses; Gloo does not keep it alive.
        rank: of this process among them.
        size: number of ranks.
        longest_wait: seconds that an operation may take.
    """

    store: SignedStore
    rank: int
    size: int
    longest_wait: float

    def join(self) -> Any:
        """The process group, once all ranks have called this."""
        return dist.ProcessGroupGloo(self.store, self.rank, self.size, timedelta(seconds=self.longest_wait))

    def among(self, ranks: Sequence[int], is_over: Callable[[], bool]) -> GlooPlace:
        """That of some of the ranks, this one among them, who are awaited until `is_over`."""
        return GlooPlace(
            store=self.store.under("-".join(map(str, ranks))).until(is_over),
            rank=list(ranks).index(self.rank),
            size=len(ranks),
            longest_wait=self.longest_wait,
        )


class AbortableGloo:
    """A process group of Gloo's, whose every operation may be given up.

    Args:
        gloo: the group; nobody else uses it.
        place: where its ranks met; None where no groups of some of them will be made.

    Attributes:
        error: why there will be no further operation; None while all is well.
    """

    def __init__(self, gloo: Any, place: GlooPlace | None = None) -> None:
        self.error: Exception | None = None
        self._gloo, self._place = gloo, place
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Pending, Any, Any]] = {}
        self._next = 0
        self._lanes: dict[Hashable, SimpleQueue[Callable[[], None] | None]] = {}
        self._parts: list[AbortableGloo] = []

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Start to sum `tensor` over the ranks, in place; the future holds it, or raises why there is no sum."""
        return self.begin(lambda gloo: gloo.allreduce([tensor]), tensor)

    def begin(self, start: Callable[[Any], Any], kept: Any) -> Pending:
        """Start a collective; a future of `kept`, its tensors, or of why it failed.

        Args:
            start: begins it in the process group, and returns its work.
            kept: all tensors that it reads or writes.
        """
        key, found, work = self._started(start, kept)
        work.get_future().then(lambda done: self._end(key, done.value))
        return found

    def message(self, start: Callable[[Any], Any], kept: Any, way: Hashable) -> Pending:
        """Start a message of one rank to another, as `begin`; it can only be waited for, in a thread of its `way`.

        Args:
            start: see above.
            kept: see above.
            way: whose messages end in order: from whom, to whom, and of what kind.
        """
        key, found, work = self._started(start, kept)
        self._lane(way).put(lambda: self._end(key, work.wait))
        return found

    def among(self, ranks: Sequence[int]) -> AbortableGloo:
        """The group of some ranks, this one among them, who all call this; it ends with this one."""
        assert self._place is not None
        joining = _Joining(self._place.among(ranks, lambda: self.error is not None))
        self.message(lambda _: joining, joining, "joining").wait()
        part = AbortableGloo(joining.gloo, joining.place)
        with self._lock:
            self._parts.append(part)
            error = self.error
        if error is not None:
            part.abort(error)
        return part

    def abort(self, error: Exception) -> None:
        """From now on whoever waits, or begins, raises `error`; from any thread."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            left, parts = [found for found, _, _ in self._open.values()], list(self._parts)
        for found in left:
            found.set_exception(error)
        for part in parts:
            part.abort(error)

    @property
    def has_failed(self) -> bool:
        """Whether an operation failed, or was given up, here or among some of the ranks."""
        return self.error is not None or any(part.has_failed for part in self._parts)

    def let_go(self) -> bool:
        """Whether nothing is under way after `abort`; the group is then let go, which does not block any more."""
        parts_end = [part.let_go() for part in self._parts]
        gloo = None
        with self._lock:
            if self._open or not all(parts_end):
                return False
            gloo, self._gloo = self._gloo, None
            for lane in self._lanes.values():
                lane.put(None)
            self._lanes = {}
        del gloo  # without the lock, which a thread that it waits for may want
        return True

    def _started(self, start: Callable[[Any], Any], kept: Any) -> tuple[int, Pending, Any]:
        try:
            with self._lock:
                if self.error is not None:
                    raise self.error
                assert self._gloo is not None
                work = start(self._gloo)
                key, self._next = self._next, self._next + 1
                found: Pending = torch.futures.Future()
                self._open[key] = (found, kept, work)
        except RuntimeError as error:  # as when a peer has closed the connection already
            self.abort(error)
            raise
        return key, found, work

    def _lane(self, way: Hashable) -> SimpleQueue[Callable[[], None] | None]:
        """What the thread of a way has to wait for."""
        if way not in self._lanes:
            lane = self._lanes[way] = SimpleQueue()
            threading.Thread(target=_follow, args=(lane,), name="evener-messages", daemon=True).start()
        return self._lanes[way]

    def _end(self, key: int, outcome: Callable[[], object]) -> None:
        """An operation ends, in another thread; one that failed is the end of all."""
        failed: Exception | None = None
        try:
            outcome()
        except (RuntimeError, NodeLost) as error:
            failed = error
        with self._lock:
            found, kept, _ = self._open.pop(key)
            if self.error is not None:
                return
        if failed is not None:
            self.abort(failed)  # first: whoever waits for this one asks why when it wakes up
            found.set_exception(failed)
        else:
            found.set_result(kept)


class _Joining:
    """A process group that is being made: what `message` can wait for."""

    def __init__(self, place: GlooPlace) -> None:
        self.place, self.gloo = place, None

    def wait(self) -> None:
        """Make it."""
        self.gloo = self.place.join()


def _follow(lane: SimpleQueue[Callable[[], None] | None]) -> None:
    """The thread of one way."""
    while (waiting := lane.get()) is not None:
        waiting()
