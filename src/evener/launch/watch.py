"""Notices within `patience` seconds that a rank has died or stands still, and says which one, at which step.

Every rank writes a growing number and its step to the store that all share, several times a second, from a thread of
its own; a rank whose number has not grown for `patience` seconds, by the reader's own clock, is lost. That needs no
common clock, works when the main thread waits inside a collective for ever, and does not mistake slow for dead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

_FAILURE = "failure"


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What was last heard of a rank.

    Attributes:
        count: of its beats; 0 before the first.
        step: that it works on; 0 before the first.
        since: this rank's clock when the count last grew.
    """

    count: int
    step: int
    since: float


def silent_ranks(beats: Sequence[Beat], now: float, patience: float) -> list[int]:
    """The ranks whose count has not grown for `patience` seconds at time `now`, in order."""
    return [rank for rank, beat in enumerate(beats) if now - beat.since > patience]


class Watch:
    """One rank's watch over the others.

    Args:
        store: shared by all ranks; used by this thread alone.
        rank: of this process.
        nodes: name of every rank's node.
        patience: seconds of silence after which a rank is lost.
        on_lost: called once, in this thread, with one sentence about who is lost.
    """

    def __init__(
        self,
        store: dist.Store,  # type: ignore[name-defined]
        *,
        rank: int,
        nodes: Sequence[str],
        patience: float,
        on_lost: Callable[[str], None],
    ) -> None:
        self._thread = threading.Thread(target=self._run, name="evener-watch", daemon=True)
        self.step = 0
        self._store, self._rank, self._nodes = store, rank, nodes
        self._patience, self._on_lost = patience, on_lost
        self._interval = min(0.5, patience / 8)
        self._done = threading.Event()
        now = time.monotonic()
        self._beats = [Beat(count=0, step=0, since=now) for _ in nodes]

    def start(self) -> None:
        """Begin to beat and to listen, until stopped or until somebody is lost."""
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Wait at most `timeout` seconds until the watch has ended."""
        self._thread.join(timeout)

    def _run(self) -> None:
        count = 0
        while not self._done.wait(self._interval):
            count += 1
            sentence = self._look(count)
            if sentence and not self._done.is_set():
                self._on_lost(sentence)
                return

    def stop(self) -> None:
        """End the watch; this rank counts as having left, not as lost."""
        self._done.set()
        self._leave_word(_left(self._rank), "1")
        if self._thread.ident is not None:
            self.join(timeout=self._patience)

    def report_failure(self, sentence: str) -> None:
        """Leave word of this rank's own failure, so that the others need not wait to name it."""
        self._leave_word(_FAILURE, sentence)

    def _leave_word(self, key: str, word: str) -> None:
        try:
            self._store.set(key, word)
        except RuntimeError:
            return  # the store is gone, and with it whoever could have read this

    def _look(self, count: int) -> str | None:
        """Beat, then listen to the others; a sentence if one of them is lost."""
        try:
            self._store.set(_key(self._rank), f"{count}:{self.step}")
            if self._store.check([_FAILURE]):
                return str(self._store.get(_FAILURE).decode())
            self._listen()
        except RuntimeError as error:
            return f"the store that all ranks share is gone, with the process that kept it ({_first_line(error)})"
        silent = [r for r in silent_ranks(self._beats, time.monotonic(), self._patience) if not self._has_left(r)]
        return self._name(silent[0]) if silent else None

    def _has_left(self, rank: int) -> bool:
        return bool(self._store.check([_left(rank)]))

    def _listen(self) -> None:
        now = time.monotonic()
        for rank, beat in enumerate(self._beats):
            key = _key(rank)
            if rank == self._rank:
                self._beats[rank] = Beat(count=beat.count, step=beat.step, since=now)
            elif self._store.check([key]):
                count, step = parse_beat(self._store.get(key))
                if count != beat.count:
                    self._beats[rank] = Beat(count=count, step=step, since=now)

    def _name(self, rank: int) -> str:
        beat = self._beats[rank]
        return (
            f"node {self._nodes[rank]} (rank {rank}) has been silent for {self._patience:g} s, "
            f"at step {beat.step}; node {self._nodes[self._rank]} waited for it"
        )


def last_step(store: dist.Store, rank: int) -> int:  # type: ignore[name-defined]
    """The step at which `rank` last was heard of; 0 before the first."""
    return parse_beat(store.get(_key(rank)))[1] if store.check([_key(rank)]) else 0


def parse_beat(text: bytes) -> tuple[int, int]:
    """(count, step) of a beat as it stands in the store."""
    count, step = text.decode().split(":")
    return int(count), int(step)


def _left(rank: int) -> str:
    return f"left/{rank}"


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
