"""Operations of Gloo that another thread can end, so that a rank can abandon lost peers and continue.

A collective of Gloo cannot be abandoned: waiting for it, aborting it and destroying its group all block while a peer is
silent. Callers therefore wait for a future of this module, which the collective or `abort` completes. An abandoned
collective may still run, and a peer that wakes up writes into its tensors. So these and the group live until it ends.

Messages between two ranks are different: two ranks that both abandon a group may each wait for a message that the other
never posts, and neither would end. So a group that is let go closes its connections if messages are open.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evener.comm.signed_store import SignedStore
from evener.comm.staged_gloo import StagedGloo

Pending = torch.futures.Future[Any]
_TOO_SHORT = timedelta(milliseconds=1)
"""Timeout of a wait for a message that is never sent."""
_UNUSED_TAG = 2**31 - 1
"""Tag of that message."""
_CLOSING_SECONDS = 0.1
"""Time that `let_go` gives operations to end after it has closed their connections."""


@dataclass(frozen=True, kw_only=True)
class GlooPlace:
    """The rendezvous of ranks for a process group of Gloo.

    Attributes:
        store: with a prefix that only this group uses; Gloo does not keep it alive.
        rank: of this process in the group.
        size: number of ranks.
        longest_wait: seconds that an operation may take.
        is_staged: whether tensors of some ranks are on accelerators; the same on all ranks.
    """

    store: SignedStore
    rank: int
    size: int
    longest_wait: float
    is_staged: bool = False

    def join(self) -> Any:
        """Return the process group, once all ranks have called this."""
        gloo = dist.ProcessGroupGloo(self.store, self.rank, self.size, timedelta(seconds=self.longest_wait))
        return StagedGloo(gloo) if self.is_staged else gloo

    def among(self, ranks: Sequence[int], is_over: Callable[[], bool]) -> GlooPlace:
        """Return the rendezvous of some of the ranks, which this rank waits for until `is_over`."""
        return GlooPlace(
            store=self.store.under("-".join(map(str, ranks))).until(is_over),
            rank=list(ranks).index(self.rank),
            size=len(ranks),
            longest_wait=self.longest_wait,
            is_staged=self.is_staged,
        )


class AbortableGloo:
    """A process group of Gloo whose operations can be aborted.

    Args:
        gloo: the group, used by this object only.
        place: rendezvous of its ranks; None if no subgroups are needed.

    Attributes:
        error: error that ended the group; None while it works.
        place: rendezvous of its ranks; None if no subgroups are needed.
    """

    def __init__(self, gloo: Any, place: GlooPlace | None = None) -> None:
        self.error: Exception | None = None
        self.place = place
        self._gloo = gloo
        self._lock = threading.Lock()
        self._has_ended = threading.Condition(self._lock)
        self._open: dict[int, tuple[Pending, Any, Any]] = {}
        self._messages: set[int] = set()
        self._next = 0
        self._lanes: dict[Hashable, SimpleQueue[Callable[[], None] | None]] = {}
        self._parts: list[AbortableGloo] = []

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Start to sum `tensor` over the ranks, in place; the future returns it or raises the error."""
        return self.begin(lambda gloo: gloo.allreduce([tensor]), tensor)

    def begin(self, start: Callable[[Any], Any], tensors: Any) -> Pending:
        """Start a collective; return a future of its `tensors`.

        Args:
            start: starts it in the process group, and returns its work.
            tensors: all tensors that it reads or writes.
        """
        key, future, work = self._started(start, tensors)
        if self.is_staged:
            self._lane("collectives").put(lambda: self._end(key, work.wait))
        else:
            work.get_future().then(lambda done: self._end(key, done.value))
        return future

    def message(self, start: Callable[[Any], Any], tensors: Any, lane: Hashable) -> Pending:
        """Start a message between two ranks; a thread of its `lane` waits for it.

        Args:
            start: starts it in the process group, and returns its work.
            tensors: all tensors that it reads or writes.
            lane: sender, receiver and tag; messages of one lane complete in order.
        """
        key, future, work = self._started(start, tensors, is_message=True)
        self._lane(lane).put(lambda: self._end(key, work.wait))
        return future

    def among(self, ranks: Sequence[int]) -> AbortableGloo:
        """Return the group of some ranks including this one, which all call this; it ends with this group."""
        assert self.place is not None
        joining = _Joining(self.place.among(ranks, lambda: self.error is not None))
        self.message(lambda _: joining, joining, "joining").wait()
        part = AbortableGloo(joining.gloo, joining.place)
        with self._lock:
            self._parts.append(part)
            error = self.error
        if error is not None:
            part.abort(error)
        return part

    def abort(self, error: Exception) -> None:
        """Raise `error` in all current and later operations; from any thread."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            futures, parts = [future for future, _, _ in self._open.values()], list(self._parts)
        for future in futures:
            future.set_exception(error)
        for part in parts:
            part.abort(error)

    @property
    def has_failed(self) -> bool:
        """Whether an operation failed or was aborted, here or in a subgroup."""
        return self.error is not None or any(part.has_failed for part in self._parts)

    @property
    def is_staged(self) -> bool:
        """Whether tensors of some ranks are on accelerators."""
        return isinstance(self._gloo, StagedGloo)

    def let_go(self) -> bool:
        """Release the group if all operations have ended after `abort`; return whether it did.

        Messages under way end with an error, here and at the peers. Closing their connections takes about 10 ms a rank,
        and waiting for their end at most 0.1 s; without messages this does not block.
        """
        parts_end = [part.let_go() for part in self._parts]
        gloo = None
        with self._lock:
            closed = self._gloo if self._messages and self.error is not None else None
        if closed is not None:
            _close_connections(closed)
        with self._lock:
            if closed is not None:
                self._has_ended.wait_for(lambda: not self._open, _CLOSING_SECONDS)
            if self._open or not all(parts_end):
                return False
            gloo, self._gloo = self._gloo, None
            for lane in self._lanes.values():
                lane.put(None)
            self._lanes = {}
        if isinstance(gloo, StagedGloo):
            gloo.close()
        del gloo, closed  # without the lock, which a thread that it joins may need
        return True

    def _started(
        self, start: Callable[[Any], Any], tensors: Any, *, is_message: bool = False
    ) -> tuple[int, Pending, Any]:
        try:
            with self._lock:
                if self.error is not None:
                    raise self.error
                assert self._gloo is not None
                work = start(self._gloo)
                key, self._next = self._next, self._next + 1
                future: Pending = torch.futures.Future()
                self._open[key] = (future, tensors, work)
                if is_message:
                    self._messages.add(key)
        except RuntimeError as error:  # as when a peer has closed the connection already
            self.abort(error)
            raise
        return key, future, work

    def _lane(self, name: Hashable) -> SimpleQueue[Callable[[], None] | None]:
        """Return the queue of the thread that waits for messages of this lane."""
        if name not in self._lanes:
            lane = self._lanes[name] = SimpleQueue()
            threading.Thread(target=_follow, args=(lane,), name="evener-messages", daemon=True).start()
        return self._lanes[name]

    def _end(self, key: int, outcome: Callable[[], object]) -> None:
        """Complete an operation, in another thread; a failure aborts the group."""
        failed: Exception | None = None
        try:
            outcome()
        except Exception as error:  # of any kind, if the message could not be started
            failed = error
        with self._lock:
            future, tensors, _ = self._open.pop(key)
            self._messages.discard(key)
            self._has_ended.notify_all()
            if self.error is not None:
                return
        if failed is not None:
            self.abort(failed)  # first, as the thread that waits for this future reads `error`
            future.set_exception(failed)
        else:
            future.set_result(tensors)


class _Joining:
    """A rendezvous under way, in the form that `message` waits for."""

    def __init__(self, place: GlooPlace) -> None:
        self.place, self.gloo = place, None

    def wait(self) -> None:
        """Create the process group."""
        self.gloo = self.place.join()


def _close_connections(group: Any) -> None:
    """Close all connections of a process group, so that its operations end with an error, here and at the peers.

    Gloo does so over TCP when a wait for a message exceeds its timeout. Over libuv, on macOS, it does not: there
    messages end after the timeout of the group.
    """
    gloo = group.inner if isinstance(group, StagedGloo) else group
    with suppress(RuntimeError):
        gloo.recv([torch.empty(1)], (gloo.rank() + 1) % gloo.size(), _UNUSED_TAG).wait(_TOO_SHORT)


def _follow(lane: SimpleQueue[Callable[[], None] | None]) -> None:
    """Wait for the messages of one lane, in order."""
    while (waiting := lane.get()) is not None:
        waiting()
        del waiting  # and with it the tensors of the message
