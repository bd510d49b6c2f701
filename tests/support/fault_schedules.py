"""Seeded schedules of faults, what they did to a run, and whether its end is justified.

    schedule(seed) -> faults -> Strikes (who was struck, and who held the state) -> judge -> a line of JSON a seed

`python -m support.fault_schedules FILE` prints a summary of such lines.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from support.commands import processes_of

PATIENCE, LONGEST, NODES = 3.0, 150.0, 3
HOLDERS = "EVENER_TEST_HOLDERS"
"""Variable of the environment: folder where every process that computes gradients leaves a file named by its id."""
RESULTS = "EVENER_SCHEDULE_RESULTS"
"""Variable of the environment: file to which every seed adds a line of JSON; nothing is written if it is not set."""
LOST = 4
"""Exit code of a run whose nodes were lost."""
_LOOK_SECONDS = 0.3
_FATAL_SECONDS = 0.8 * PATIENCE
"""Of a freeze or a cut, in all: a process that was away for longer may have been given up."""
_END_SECONDS = 3.0
"""Before the end of a run, within which a process was last seen that lived until then."""
_RESTART = re.compile(r"^step +(?:0  .*(?:begins again|the others go on)|\d+  begins again: from the checkpoint)", re.M)
"""Line that a run shows when it starts from its first step or a checkpoint, after all earlier processes have ended."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one process, host or master.

    Attributes:
        at: seconds after the first rank was seen.
        kind: what is done.
        victim: number of the node, of those that are there.
        seconds: until it is undone, where it can be.
    """

    at: float
    kind: str
    victim: int
    seconds: float


def schedule(seed: int, kinds: Sequence[str], span: float) -> list[Fault]:
    """Two to eight faults within `span` seconds, one of them at once in every other schedule."""
    draw = random.Random(seed)
    times = sorted(draw.uniform(0, span) for _ in range(draw.randint(2, 8)))
    if draw.random() < 0.5:
        times[0] = 0.0
    return [
        Fault(at=at, kind=draw.choice(kinds), victim=draw.randrange(NODES), seconds=PATIENCE * draw.uniform(0.3, 2.5))
        for at in times
    ]


@dataclass
class Rank:
    """A process that stood for a node.

    Attributes:
        first: seconds after the start when it was first seen.
        last: when it was last seen.
        strikes: kinds of the faults that met it.
        away: seconds for which it was frozen or cut off, in all.
        holds: whether it computed gradients.
    """

    first: float
    last: float
    strikes: list[str] = field(default_factory=list)
    away: float = 0.0
    holds: bool = False

    @property
    def is_healthy(self) -> bool:
        """Whether no fault met it that may cost the run this process."""
        return self.away < _FATAL_SECONDS and not {"kill", "terminate", "node killed"} & set(self.strikes)


class Strikes:
    """The faults that strike a run and the processes that they meet; ends each fault when it is due.

    Args:
        marker: variable of the environment by which the processes of the run are known.
        holders: see `HOLDERS`.
        said: returns what the run has shown so far.
    """

    def __init__(self, marker: str, holders: Path, said: Callable[[], str]) -> None:
        self._marker, self._holders, self._said = marker, holders, said
        self._restarts, self._restarted = 0, -1.0
        self._due: list[tuple[float, Callable[[], object]]] = []
        self._begin = self._looked = time.monotonic()
        self.ranks: dict[int, Rank] = {}
        self.made: list[dict[str, Any]] = []
        self.is_over = False

    def now(self) -> float:
        """Seconds after the start."""
        return time.monotonic() - self._begin

    def struck(self, fault: Fault, processes: Iterable[int]) -> None:
        """Note that `fault` has met `processes`."""
        self.see()
        met = [pid for pid in processes if pid in self.ranks]
        for pid in met:
            self.ranks[pid].strikes.append(fault.kind)
            if fault.kind not in ("kill", "terminate", "node killed"):
                self.ranks[pid].away += fault.seconds
        self.made.append({"kind": fault.kind, "at": round(self.now(), 2), "node": fault.victim, "ranks": met,
                          "seconds": round(fault.seconds, 2)})  # fmt: skip

    def after(self, seconds: float, undo: Callable[[], object]) -> None:
        """Have `undo` called in so many seconds."""
        self._due.append((time.monotonic() + seconds, undo))

    def look(self, *, everything: bool = False) -> None:
        """Undo what is due, and see which processes there are."""
        now = time.monotonic()
        ripe = [undo for when, undo in self._due if everything or when <= now]
        self._due = [] if everything else [one for one in self._due if one[0] > now]
        for undo in ripe:
            undo()
        if now - self._looked > _LOOK_SECONDS and not everything:
            self.see()

    def see(self) -> list[psutil.Process]:
        """The processes that stand for nodes now."""
        found, now = ranks_of(self._marker), self.now()
        for process in found:
            rank = self.ranks.setdefault(process.pid, Rank(first=now, last=now))
            rank.last, rank.holds = now, (self._holders / str(process.pid)).exists()
        self._note_restarts(now)
        self._looked = time.monotonic()
        return found

    def _note_restarts(self, now: float) -> None:
        if (restarts := len(_RESTART.findall(self._said()))) > self._restarts:
            self._restarts, self._restarted = restarts, now

    def healthy_holders(self, end: float) -> list[int]:
        """Processes that computed gradients, lived until `end`, and were never struck so that they could be lost.

        A process of an earlier start held nothing that the last start did not begin with.
        """
        self._note_restarts(end)
        return [
            pid
            for pid, rank in self.ranks.items()
            if rank.is_healthy
            and rank.last > max(end - _END_SECONDS, self._restarted)
            and (self._holders / str(pid)).exists()
        ]

    def was_given_up_healthy(self, end: float) -> list[int]:
        """Processes that computed gradients, were never struck, and ended before `end`."""
        return [
            pid
            for pid, rank in self.ranks.items()
            if not rank.strikes and rank.last <= end - _END_SECONDS and (self._holders / str(pid)).exists()
        ]


def strike_while(
    is_running: Callable[[], bool],
    enough: int,
    faults: Sequence[Fault],
    strike: Callable[[Fault, Strikes], None],
    strikes: Strikes,
) -> float:
    """Strike at the times of the schedule, from the moment that there are `enough` ranks, while the run goes on.

    Returns when it ended, in seconds after the start.
    """
    left, limit, began = list(faults), time.monotonic() + LONGEST, None
    while is_running():
        assert time.monotonic() < limit, f"the run neither completes nor ends: {strikes.made}"
        if began is None and len(strikes.see()) >= enough:
            began = time.monotonic()
        while left and began is not None and time.monotonic() - began >= left[0].at:
            strike(left.pop(0), strikes)
        strikes.look()
        time.sleep(0.02 if began is not None else 0.1)
    end = strikes.now()
    strikes.look(everything=True)
    return end


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to a process, if it is there."""
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def ranks_of(marker: str) -> list[psutil.Process]:
    """The processes of a run that are ranks, in the order in which they were started."""
    found = []
    for pid in processes_of(marker):
        try:
            process = psutil.Process(pid)
            parent = process.parent()
            if parent is not None and "forkserver" in " ".join(parent.cmdline()) and process.status() != "zombie":
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return sorted(found, key=lambda process: process.pid)


def drafts(folder: Path) -> list[str]:
    """Files and folders that were to become others when they are whole."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob(".*") if path.name != ".lock")


def resumed_step(said: str) -> int:
    """Return the step after which the last start of a run resumed, by what the run said; 0 if it began at the first.

    A command that lost its master does not hear why the run begins again, but from which checkpoint.
    """
    found = re.findall(r"(?:from\s+the\s+checkpoint\s+of|resumed\s+after)\s+step\s+(\d+)", said)
    return max(map(int, found), default=0)


def record(place: str, seed: int, strikes: Strikes, end: float, found: dict[str, Any]) -> dict[str, Any]:
    """What a seed came to; added to the file of $EVENER_SCHEDULE_RESULTS."""
    line = {
        "place": place,
        "seed": seed,
        "seconds": round(end, 1),
        **found,
        "faults": strikes.made,
        "healthy_holders": strikes.healthy_holders(end),
        "given_up_healthy": strikes.was_given_up_healthy(end),
        "ranks": {pid: vars(rank) for pid, rank in strikes.ranks.items()},
    }
    if file := os.environ.get(RESULTS):
        with Path(file).open("a") as lines:
            lines.write(json.dumps(line) + "\n")
    return line


def summary(lines: Iterable[str]) -> str:
    """How many seeds completed, ended and failed, by place and by kinds of faults; then those that failed, in full."""
    newest = {(row["place"], row["seed"]): row for row in map(json.loads, lines)}
    words = []
    for place in sorted({place for place, _ in newest}):
        rows = [row for (where, _), row in sorted(newest.items()) if where == place]
        words.append(f"{place}: {len(rows)} seeds, {dict(Counter(row['verdict'] for row in rows))}")
        for kind in sorted({fault["kind"] for row in rows for fault in row["faults"]}):
            met = [row for row in rows if kind in [fault["kind"] for fault in row["faults"]]]
            words.append(f"  with {kind}: {dict(Counter(row['verdict'] for row in met))}")
    for (place, seed), row in sorted(newest.items()):
        if row["verdict"] == "failed" or row["given_up_healthy"]:
            kinds = ", ".join(f"{fault['kind']} {fault['node']} at {fault['at']}" for fault in row["faults"])
            words.append(f"{place} {seed}: {row['verdict']} {row['why']} | {kinds} | {row['sentence']}")
            words += [f"  given up without a fault: {row['given_up_healthy']}"] if row["given_up_healthy"] else []
    return "\n".join(words)


if __name__ == "__main__":
    sys.stdout.write(summary(Path(sys.argv[1]).read_text().splitlines()) + "\n")
