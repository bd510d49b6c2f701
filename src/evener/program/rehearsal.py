"""Holds a step of the program, as its author wrote it, against one process, before the first step.

When the program is about to take its first batch, every rank forks a copy of itself, and the leader a second one:

    divided    a copy of every rank: they go on together, with a few samples of the first batches, unevenly divided
    whole      a copy of the leader: it goes on alone, with all of those samples
    the ranks  wait; the leader compares gradients, buffers and weights, and tells all of them what it found

So whatever the program does with a batch is what is compared, nothing of it is done twice, and nobody had to write a
function for it. What is random is drawn alike for every sample. Where the two differ, the gradients that the parts have
by themselves tell what the loss is: a sum, a mean over something else than samples, or a loss between samples.

Of a node that is slowed down, another copy tells what a step takes undisturbed, one node after the other.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from evener.comm.group import Group
from evener.errors import NodeLost, NotExact
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.apportion import Worker, apportion
from evener.plan import Check
from evener.profile import TaskTiming
from evener.program.accelerate_alone import refuse_accelerate
from evener.program.compared_copy import ComparedCopy
from evener.program.timed_copy import TimedCopy
from evener.program.understudy import Understudy, failure, forked
from evener.program.verdict import Verdict, judge
from evener.program.work_division import Prepared
from evener.record import Event
from evener.run.costs import CALIBRATION_SECONDS, calibrate

_SAMPLES, _MORE = 2, 2
"""Of every rank, and of the first one besides."""


class Report(msgspec.Struct, frozen=True):
    """What a rank's copies came to.

    Attributes:
        failed: how the copy that divides failed; empty if it did not.
        whole_failed: likewise the one that does the whole.
        verdict: of the leader; None where there is nothing to compare.
    """

    failed: str = ""
    whole_failed: str = ""
    verdict: Verdict | None = None


class Rehearsal:
    """The rehearsal of a rank's program.

    Args:
        env: of this rank.
        group: the ranks.
        shares: of the ranks; None: all have some.
        is_wanted: whether there is anything to compare.
        may_differ: whether what differs is told, and trained all the same.
        layers: how layers are divided; None: it is batches.

    Attributes:
        understudy: what this process is in the rehearsal, if it is a copy.
        check: what was found the last time; None before, and where nothing was compared.
        is_wanted: whether there is anything to compare.
    """

    def __init__(
        self,
        env: RankEnvironment,
        group: Group,
        shares: Sequence[float] | None,
        *,
        is_wanted: bool,
        may_differ: bool,
        layers: str | None = None,
    ) -> None:
        self._env, self._group, self._shares, self._may_differ, self._layers = env, group, shares, may_differ, layers
        self.is_wanted = is_wanted
        self.understudy: Understudy | None = None
        self.check: Check | None = None
        self._owners: set[object] = set()
        self._is_timed = False
        self._notes: list[Event] = []

    def is_new(self, owner: object) -> bool:
        """Whether the program has not trained on batches of `owner` before."""
        if self._group.size == 1 or self.understudy is not None or owner in self._owners:
            return False
        self._owners.add(owner)
        return True

    def perform(self, models: Sequence[Prepared]) -> list[Event]:
        """Compare, and time slowed nodes; in a copy, this returns at once. What the user is to be told.

        Raises:
            NotExact: the ranks would train something else than one process; all of them raise it.
            InvalidInput: another library divides the batches, too.
        """
        refuse_accelerate()
        self._notes = []
        can_copy = self._group.device.type == "cpu" and hasattr(os, "fork")
        if self.is_wanted and not can_copy:
            self._note("unchecked", "a process that uses a GPU cannot be copied: nobody compared this with one process")
            self.is_wanted = False
        if self.is_wanted:
            self._compare(models)
        if can_copy and self.understudy is None and not self._is_timed and self._layers is None:
            self._is_timed = True
            calibrate(self._env, self._group, self._time_alone)  # in a copy, nobody is waited for
        return self._notes

    def _compare(self, models: Sequence[Prepared]) -> None:
        begin = time.perf_counter()
        for precision in ("fp64", "own"):
            reports = self._round(models, is_wide=precision == "fp64")
            if self.understudy is not None:
                return
            verdict, whole_failed = reports[0].verdict, reports[0].whole_failed
            failed = _first_hand([report.failed for report in reports if report.failed])
            if not whole_failed and (verdict is not None or precision == "own"):
                break
        if verdict is None:
            self._without_verdict(failed, whole_failed)
        else:
            self._act_on(verdict, precision, time.perf_counter() - begin)

    def sizes(self, count: int) -> tuple[int, ...]:
        """Samples for every rank of a small batch of `count`: uneven, and none where the user grants none."""
        shares = self._shares or [1.0] * self._group.size
        workers = [Worker(unit_seconds=1.0, most=None if share else 0) for share in shares]
        sizes = list(apportion(max(0, count - _MORE), workers))
        sizes[next(i for i, share in enumerate(shares) if share)] += min(count, _MORE)
        return tuple(sizes)

    def _round(self, models: Sequence[Prepared], is_wide: bool) -> list[Report]:
        """What all ranks' copies came to; nothing in a copy."""
        token = self._group.told_by_leader(secrets.token_hex(8).encode()).decode()
        with self._folder() as folder:
            pids = []
            for role in ("divided", "whole") if self._group.is_leader else ("divided",):
                if (pid := forked()) == 0:
                    self._become(models, role, token, folder, is_wide)
                    return []
                pids.append(pid)
            _wait(pids)
            report = self._report(folder, is_wide)
        return [
            msgspec.json.decode(row, type=Report) for row in self._group.all_gather_bytes(msgspec.json.encode(report))
        ]

    def _become(self, models: Sequence[Prepared], role: str, token: str, folder: Path, is_wide: bool) -> None:
        """Be a copy from now on."""
        samples = _SAMPLES * self._group.size + _MORE
        sizes: Callable[[int], tuple[int, ...]] = self.sizes
        path = (folder / role).with_suffix(".safetensors")
        self.understudy = ComparedCopy(models, self._group, path, samples, sizes, is_wide, self._layers is not None)
        self.understudy.begin(self._env, None if role == "whole" else token)

    def _time_alone(self) -> TaskTiming | None:
        """What steps take this rank at full speed while nobody else computes; None in a copy, and if one failed."""
        with self._folder() as folder:
            path = folder / "alone.json"
            if (pid := forked()) == 0:
                self.understudy = TimedCopy(self._group, path, CALIBRATION_SECONDS)
                self.understudy.begin(self._env)
                return None
            _wait([pid])
            return None if failure(path) else msgspec.json.decode(path.read_bytes(), type=TaskTiming)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """Where copies write, until the rank itself leaves it."""
        folder = Path(tempfile.mkdtemp(prefix="evener-"))
        try:
            yield folder
        finally:
            if self.understudy is None:
                shutil.rmtree(folder, ignore_errors=True)

    def _report(self, folder: Path, is_wide: bool) -> Report:
        divided, whole = folder / "divided.safetensors", folder / "whole.safetensors"
        failed = failure(divided)
        if not self._group.is_leader:
            return Report(failed=failed)
        whole_failed = failure(whole)
        verdict = None if failed or whole_failed else judge(divided, whole, is_wide, self._layers)
        return Report(failed=failed, whole_failed=whole_failed, verdict=verdict)

    def _without_verdict(self, failed: str, whole_failed: str) -> None:
        if whole_failed:
            self._note("unchecked", f"a step of a few samples fails also in one process ({whole_failed})")
        elif self._may_differ:
            self._note("approximate", f"a divided step cannot be computed ({failed})")
        else:
            raise NotExact(_failure(failed, self._layers))

    def _act_on(self, verdict: Verdict, precision: str, seconds: float) -> None:
        if verdict.sentence and not self._may_differ:
            raise NotExact(verdict.sentence)
        if verdict.sentence:
            self._note("approximate", verdict.sentence)
        self.check = Check(
            samples=self.sizes(_SAMPLES * self._group.size + _MORE),
            precisions=(precision,),
            where=verdict.where,
            off=verdict.off,
            seconds=seconds,
        )

    def _note(self, kind: str, message: str) -> None:
        self._notes.append(Event(step=0, kind=kind, message=message))


def _first_hand(failures: Sequence[str]) -> str:
    """The failure that explains the others: copies that only lost another one are not it; empty without one."""
    return min(failures, key=lambda failure: failure.startswith(f"{NodeLost.__name__}:"), default="")


def _failure(failed: str, layers: str | None) -> str:
    """That the copies failed which divided a step, though not the one that did the whole."""
    if layers is None:
        return f"the program fails with a part of a batch, though not with the whole: {failed}"
    return f"--strategy {layers} cannot divide this program: {failed}; leave it out, and nodes divide its batches"


def _wait(pids: Sequence[int]) -> None:
    """Until all have ended; they end themselves in time."""
    for pid in pids:
        os.waitpid(pid, 0)
