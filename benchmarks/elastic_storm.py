"""The storm of `elastic.py`: who of a run is killed or frozen, and when; drawn from a seed."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

_NEWS = re.compile(r"; (\d+) nodes? of \d+ go on|(node-\d+) (came|caught up with|was killed|has been silent)")
_KINDS = {"was killed": "killed", "has been silent": "frozen"}
"""Which fault the run speaks of with these words."""
_LONGEST_MATCH = 80
_MARGIN = 15.0
"""Seconds, besides the patience, after which a killed process was no rank, if the run does not speak of its loss."""
_LAST_WORDS = 3000
"""Characters of what a run said that failed."""
_LOOK = 0.02


@dataclass(frozen=True, kw_only=True)
class Weather:
    """What a storm is like.

    Attributes:
        seed: decides who suffers what, and when.
        apart: least and most seconds between faults.
        frozen: probability that a fault is a freeze.
        faults: after so many the storm is over; 0: it never is.
        seconds: after so many, likewise.
        patience: of the run.
    """

    seed: int
    apart: tuple[float, float]
    frozen: float
    faults: int
    seconds: float
    patience: float


class Told:
    """What a run has said in a file about who goes on, read as it grows.

    Attributes:
        going_on: nodes, as it said last; None before.
        behind: those of them that have come and do not hold the state of the training yet.
        has_begun: whether it has told of the first epoch.
        lost: of how many nodes it has said so far that they were killed, and that they were silent.
    """

    def __init__(self, said: Path) -> None:
        self._file, self._rest = said.open(), ""
        self.has_begun = False
        self.going_on: int | None = None
        self.behind: set[str] = set()
        self.lost: Counter[str] = Counter()

    def read(self) -> None:
        """Take note of what is new."""
        self._rest += self._file.read().replace("\n", " ")
        self.has_begun = self.has_begun or "epoch 1" in self._rest
        end = max(0, len(self._rest) - _LONGEST_MATCH)
        for match in _NEWS.finditer(self._rest):
            self._note(*match.groups())
            end = max(end, match.end())
        self._rest = self._rest[end:]

    def _note(self, going_on: str | None, node: str, what: str) -> None:
        if going_on is not None:
            self.going_on = int(going_on)
        elif what == "came":
            self.behind.add(node)
        else:
            self.behind.discard(node)
            self.lost.update(kind for words, kind in _KINDS.items() if words == what)

    def close(self) -> None:
        """Read no more."""
        self._file.close()


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What was done to one process.

    Attributes:
        kind: `killed` or `frozen`.
        victim: the process.
        wakes: when a frozen one goes on; never, if it was killed.
        untold_until: when it is certain that the run will not speak of it: the victim was no rank yet, or woke in time.
    """

    kind: str
    victim: psutil.Process
    wakes: float
    untold_until: float


class Storm:
    """Kills and freezes processes of one run while it goes on.

    Whoever goes on is let alone while he may be the only one who holds the state of the training.

    Args:
        run: whose processes suffer.
        said: file with what it says.
        nodes: of the run.
        weather: what the storm is like.

    Attributes:
        done: how often each kind of fault was made.
        seconds: from the first fault to the last.
    """

    def __init__(self, run: subprocess.Popen[bytes], said: Path, nodes: int, weather: Weather) -> None:
        self.done: Counter[str] = Counter()
        self.seconds = 0.0
        self._run, self._nodes, self._weather, self._random = run, nodes, weather, random.Random(weather.seed)
        self._told, self._said = Told(said), said
        self._sleepers: list[Fault] = []
        self._untold: list[Fault] = []

    def rage(self, on_over: Callable[[], object]) -> None:
        """Until the run is over, calling `on_over` when the storm is. Raises CalledProcessError: it failed."""
        began = due = 0.0
        while self._run.poll() is None:
            time.sleep(_LOOK)
            now = time.monotonic()
            self._wake(now)
            if self._is_over:
                on_over()
            elif now >= due and self._remaining(now) > 1:
                began, due = began or now, now + self._random.uniform(*self._weather.apart)
                self._strike(now)
                self.seconds = now - began
        self._wake(float("inf"))
        self._told.close()
        if self._run.returncode:
            self._report_failure()
            raise subprocess.CalledProcessError(self._run.returncode, "evener train")

    @property
    def _is_over(self) -> bool:
        weather = self._weather
        return 0 < weather.faults <= self.done.total() or 0 < weather.seconds <= self.seconds

    def _remaining(self, now: float) -> int:
        """Nodes that surely go on and hold the state: those that the run spoke of last, less whom it may miss yet."""
        told, before = self._told, self._told.lost.copy()
        told.read()
        for kind in _KINDS.values():
            self._forget(kind, told.lost[kind] - before[kind])
        self._untold = [fault for fault in self._untold if now < fault.untold_until]
        at_first = self._nodes if told.has_begun else 0
        going_on = at_first if told.going_on is None else told.going_on
        return going_on - len(told.behind) - len(self._untold)

    def _forget(self, kind: str, count: int) -> None:
        """The oldest faults of this kind: the run has spoken of so many."""
        for fault in [fault for fault in self._untold if fault.kind == kind][:count]:
            self._untold.remove(fault)

    def _strike(self, now: float) -> None:
        frozen = {fault.victim.pid for fault in self._sleepers}
        awake = [process for process in ranks_of(self._run.pid) if process.pid not in frozen]
        if len(awake) < 2:  # somebody has to go on
            return
        victim, is_frozen = self._random.choice(awake), self._random.random() < self._weather.frozen
        try:
            victim.send_signal(signal.SIGSTOP if is_frozen else signal.SIGKILL)
        except psutil.NoSuchProcess:
            return
        self._note(victim, is_frozen, now)

    def _note(self, victim: psutil.Process, is_frozen: bool, now: float) -> None:
        patience = self._weather.patience
        asleep = patience * self._random.uniform(0.5, 2.0) if is_frozen else 0.0
        fault = Fault(
            kind="frozen" if is_frozen else "killed",
            victim=victim,
            wakes=now + asleep,
            untold_until=now + asleep + patience + (patience if is_frozen else _MARGIN),
        )
        self.done[fault.kind] += 1
        self._untold.append(fault)
        if is_frozen:
            self._sleepers.append(fault)

    def _wake(self, now: float) -> None:
        for fault in self._sleepers:
            if fault.wakes <= now and fault.victim.is_running():
                fault.victim.send_signal(signal.SIGCONT)
        self._sleepers = [fault for fault in self._sleepers if fault.wakes > now and fault.victim.is_running()]

    def _report_failure(self) -> None:
        sys.stderr.write(self._said.read_text()[-_LAST_WORDS:])
        untold = [f"{fault.kind} process {fault.victim.pid}" for fault in self._untold]
        sys.stderr.write(f"Not spoken of: {', '.join(untold) or 'none'}; behind: {sorted(self._told.behind)}\n")


def ranks_of(pid: int) -> list[psutil.Process]:
    """The processes that stand for the nodes of the run `pid`."""
    servers = [child for child in psutil.Process(pid).children() if "forkserver" in " ".join(child.cmdline())]
    found = [rank for server in servers for rank in server.children()]
    return sorted((rank for rank in found if rank.status() != psutil.STATUS_ZOMBIE), key=lambda rank: rank.pid)
