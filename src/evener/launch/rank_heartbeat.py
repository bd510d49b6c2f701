"""Heartbeats between ranks, which detect a lost rank before the first generation, and where there is no coordinator.

Every rank writes an increasing number and its step to the shared store, several times a second. A separate thread does
so, because the main thread may block in a collective. `evener.system.heartbeat` has the rule.

In an elastic run this holds until the first generation; from then on the coordinator detects silence instead
(`evener.membership.coordinator`), and heartbeats end.

A rank that loses its connection to the store receives no heartbeats, and its calls of the store never return. Another
thread then ends it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any, TypeAlias

import msgspec

from evener.comm.peer_lines import PeerLines
from evener.comm.signed_store import SignedStore
from evener.launch.store import LEAST_START_SECONDS
from evener.records.error_kind import ErrorKind, kind_of
from evener.records.errors import EvenerError, NodeLost, explain, first_line
from evener.system.heartbeat import ListenedSeconds, Progress, interval

_FAILURE, _SHARED_FAILURE, _STOP = "failure", "shared failure", "stop"
_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
_Ending: Any = tuple[ErrorKind, str] | None
_SHARED_SECONDS = 2.0
"""Time in which a rank raises the shared error that another one has reported."""
_HEARING_SECONDS = 2.0
"""Time in which the rank that keeps the store lets the others read there why they end."""
_CAUSE_SECONDS = 0.5
"""Time in which a rank that lost a connection looks for the error of the rank at the other end."""


class StoreWatch:
    """A check that the store answers; a context that runs it in a thread.

    Args:
        patience: seconds within which the store has to answer.
        on_silent: called once, in that thread, with an error after `patience` seconds without an answer.
        node: name of this process's node.
    """

    def __init__(self, patience: float, on_silent: Callable[[NodeLost], None], node: str) -> None:
        self._patience, self._on_silent, self._node = patience, on_silent, node
        self._count, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._run, name="evener-store-watch", daemon=True)

    def answered(self) -> None:
        """Record an answer of the store."""
        self._count += 1

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._done.set()
        if self._thread.ident is not None:
            self._thread.join()

    def __enter__(self) -> StoreWatch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        progress, listened = Progress(0.0), ListenedSeconds(self._patience, time.monotonic())
        while not self._done.wait(interval(self._patience)):
            if progress.idle_seconds(self._count, now=listened.at(time.monotonic())) > self._patience:
                self._on_silent(
                    NodeLost(
                        f"the store that all ranks share has not answered node {self._node} for {self._patience:g} s: "
                        "the machine that keeps it is gone, or the line to it is cut"
                    )
                )
                return


class RankHeartbeat:
    """One rank's heartbeat, and its check of the others'.

    Args:
        store: shared by all ranks; used by this thread alone.
        rank: of this process.
        nodes: name of every rank's node.
        patience: seconds of silence after which a rank is lost.
        on_lost: called once, in this thread, with an error that names the lost rank.
        keeps_store: whether this process keeps the store.
        store_patience: seconds within which the store has to answer; `patience` by default.
        on_stop: called in this thread when another rank asks all to stop.

    Attributes:
        step: current step of this rank.
    """

    def __init__(
        self,
        store: SignedStore,
        *,
        rank: int,
        nodes: Sequence[str],
        patience: float,
        on_lost: Callable[[NodeLost], None],
        keeps_store: bool = False,
        store_patience: float | None = None,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._thread = threading.Thread(target=self._run, name="evener-heartbeat", daemon=True)
        self.step = 0
        self._store, self._rank, self._nodes = store, rank, nodes
        self._patience, self._on_lost, self._keeps_store, self._on_stop = patience, on_lost, keeps_store, on_stop
        self._done, self._shared_since = threading.Event(), 0.0
        self._lines: PeerLines | None = None
        self._watch = StoreWatch(store_patience or patience, on_lost, nodes[rank])
        self._listened = ListenedSeconds(patience, time.monotonic())
        self._others = {other: Progress(0.0) for other in range(len(nodes)) if other != rank}

    def start(self) -> None:
        """Begin to beat and to listen, until stopped or until a rank is lost."""
        self._thread.start()
        self._watch.start()

    @property
    def is_beating(self) -> bool:
        """Whether this heartbeat has not been stopped, so that the other ranks listen to it."""
        return not self._done.is_set()

    def watch_lines(self, lines: PeerLines) -> None:
        """Check this rank's `lines` to the others from now on; all ranks learn of a broken one."""
        self._lines = lines

    def join(self, timeout: float) -> None:
        """Wait at most `timeout` seconds until the heartbeat has ended."""
        self._thread.join(timeout)

    def stop(self, error: BaseException | None = None) -> None:
        """End the heartbeat; this rank counts as ended, not as lost. The rank with the store outlasts the others.

        Args:
            error: error of this rank; None if it has done its work.
        """
        self._done.set()
        self._leave(_left(self._rank), _ending(error))
        if self._thread.ident is not None:
            self.join(timeout=self._patience)
        if self._keeps_store:
            self._outlast_others()
        self._watch.stop()
        if self._lines is not None:
            self._lines.close()

    def ask_to_stop(self) -> None:
        """Ask all other ranks to stop after their step."""
        self._store.set(_STOP, "1")

    def report_failure(self, sentence: str, *, is_shared: bool = False) -> None:
        """Publish this rank's own failure, so that the others can name it at once.

        Args:
            sentence: names node and error.
            is_shared: whether the others are likely to raise the same error; they have some time for it.
        """
        key = _SHARED_FAILURE if is_shared else _FAILURE
        try:
            if not self._store.check([key]):  # the first one explains the others
                self._store.set(key, sentence)
        except RuntimeError:
            return  # the store is gone, with the rank that kept it

    def first_ended(self) -> int | None:
        """Return the rank whose process was the first to end, as far as the lines between machines tell; or None."""
        return None if self._lines is None else self._lines.first_ended()

    def cause(self) -> str:
        """Return the failure that another rank publishes within a moment; empty without one."""
        until = time.monotonic() + _CAUSE_SECONDS
        while True:
            try:
                for key in (_FAILURE, _SHARED_FAILURE):
                    if self._store.check([key]):
                        return self._store.get(key).decode(errors="replace")
            except (RuntimeError, NodeLost):
                return ""
            if time.monotonic() > until:
                return ""
            time.sleep(_CAUSE_SECONDS / 10)

    def _outlast_others(self) -> None:
        """Wait until every other rank has ended, knows of a failure, or is silent for too long."""
        pause = threading.Event()
        while self._is_needed(self._listened.at(time.monotonic())):
            self._watch.answered()
            pause.wait(interval(self._patience))

    def _let_others_hear(self) -> None:
        """Wait until all others know of this rank's failure, or their time is over."""
        if not has_heard(self._store, self._rank):
            return
        until = time.monotonic() + _HEARING_SECONDS
        while time.monotonic() < until:
            if all(has_heard(self._store, other) or has_left(self._store, other) for other in self._others):
                return
            time.sleep(interval(self._patience))

    def _is_needed(self, now: float) -> bool:
        return any(self._needs_store(other, now) for other in self._others)

    def _needs_store(self, other: int, now: float) -> bool:
        if has_left(self._store, other) or has_heard(self._store, other):
            return False
        return self._others[other].idle_seconds(read_beat(self._store, other)[0], now=now) <= self._patience

    def _run(self) -> None:
        count = 0
        while not self._done.wait(interval(self._patience)):
            count += 1
            lost = self._beat(count)
            self._watch.answered()
            if lost is not None and not self._done.is_set():
                self._watch.stop()
                if self._keeps_store:
                    with suppress(RuntimeError, NodeLost):  # the store is of no use any more
                        self._let_others_hear()
                self._on_lost(lost)
                return

    def _leave(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except RuntimeError:
            return  # the store is gone, with the rank that kept it
        self._watch.answered()

    def _beat(self, count: int) -> NodeLost | None:
        """Beat, then listen to the others; an error if one of them is lost."""
        try:
            self._store.set(_key(self._rank), msgspec.json.encode((count, self.step)))
            if self._store.check([_FAILURE]):
                self._store.set(_heard(self._rank), "1")
                return NodeLost(self._store.get(_FAILURE).decode(errors="replace"))
            if self._store.check([_SHARED_FAILURE]):
                self._shared_since = self._shared_since or time.monotonic()
                if time.monotonic() - self._shared_since > _SHARED_SECONDS:
                    self._store.set(_heard(self._rank), "1")
                    return NodeLost(self._store.get(_SHARED_FAILURE).decode(errors="replace"))
            if self._store.check([_STOP]):
                self._on_stop()
            if self._lines is not None and (cut := self._lines.cut()) is not None:
                self.report_failure(str(cut))
                self._store.set(_heard(self._rank), "1")
                return cut
            return self._find_lost(self._listened.at(time.monotonic()))
        except NodeLost as error:
            return error
        except RuntimeError as error:
            why = first_line(error)
            return NodeLost(f"the store that all ranks share is gone, with the process that kept it ({why})")

    def _find_lost(self, now: float) -> NodeLost | None:
        beats = {other: read_beat(self._store, other) for other in self._others}
        idle = {other: p.idle_seconds(beats[other][0], now=now) for other, p in self._others.items()}
        for other, seconds in idle.items():
            has_started = beats[other][0] > 0  # until then it loads PyTorch, which others may have loaded before
            limit = self._patience if has_started else max(self._patience, LEAST_START_SECONDS)
            if seconds > limit and not self._store.check([_left(other)]):
                return NodeLost(
                    f"node {self._nodes[other]} (rank {other}) has been silent for {limit:g} s, "
                    f"at step {beats[other][1]}; node {self._nodes[self._rank]} waited for it",
                    (self._nodes[other],),
                )
        return None


def read_beat(store: SignedStore, rank: int) -> tuple[int, int]:
    """Return the number of the last heartbeat of `rank` and its step; zeros before the first."""
    if not store.check([_key(rank)]):
        return 0, 0
    return store.get_as(_key(rank), tuple[_Number, _Number])


def has_left(store: SignedStore, rank: int) -> bool:
    """Whether the heartbeat of `rank` has ended regularly, so that its silence means nothing."""
    return store.check([_left(rank)])


def has_heard(store: SignedStore, rank: int) -> bool:
    """Whether `rank` knows of the failure by which all ranks end."""
    return store.check([_heard(rank)])


def read_ending(store: SignedStore, rank: int) -> EvenerError | None:
    """Return the error of `rank`, which has ended; None if it had done its work."""
    ending: tuple[ErrorKind, str] | None = store.get_as(_left(rank), _Ending)
    return None if ending is None else ending[0].as_error(ending[1])


def published_failure(store: SignedStore) -> str:
    """Return the failure of one rank that ends all others; empty without one."""
    return store.get(_FAILURE).decode(errors="replace") if store.check([_FAILURE]) else ""


def _ending(error: BaseException | None) -> str:
    return msgspec.json.encode(None if error is None else (kind_of(error), explain(error)[0])).decode()


def _left(rank: int) -> str:
    return f"left/{rank}"


def _heard(rank: int) -> str:
    return f"heard/{rank}"


def _key(rank: int) -> str:
    return f"beat/{rank}"
