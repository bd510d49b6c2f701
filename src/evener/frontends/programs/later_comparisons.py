"""The repetitions of a program's comparison with one process, while its ranks train.

They begin when an epoch begins (the second, third, fifth, ninth ... and the last), after some steps, and when the
program computes its loss in another way, because some differences appear later, such as a rare class or loss weights
that follow the epoch. The first ones take as many samples as a small part of the run's time allows, others take few.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from evener.comm.group import Group
from evener.frontends.programs.equivalence_probe import Extent, Findings
from evener.frontends.programs.forked_replica import SECONDS
from evener.frontends.programs.replica_comparison import ReplicaComparison
from evener.records.decoding import decode_json, decode_msgpack
from evener.records.errors import NotExact, TrainingFailed, first_line
from evener.records.record import Event
from evener.system.process_exit import launch_folder

MIN_ROUNDS = 2
"""Smallest number of batches that lead to an update: in one, a wrong divisor may be right by chance."""
_MAX_ROUNDS, _AT_ONCE = 8, 3
"""Largest number of batches of a comparison, and how many comparisons compute at a time."""
_SECONDS, _FRACTION = 0.3, 0.01
"""Processor time of a comparison's whole replica: seconds, or a fraction of the run so far if that is more."""
_SHORT_SECONDS = 0.3
"""Processor time of a replica that need not wait for an idle CPU."""
_SMALL_AT_ONCE = 6
"""Comparisons that compute at a time while another one of few samples may begin."""
_FIRST_STEP, _GROWTH = 25, 3.0
"""Step after which the program is compared again, and the growth of the intervals after it."""
_LOOK_SECONDS = 0.01
_TOPIC = "the comparison of a later step"
_TOO_SLOW = "it did not finish, as other processes used the CPUs"


class Report(msgspec.Struct, frozen=True):
    """The results of a rank's replicas.

    Attributes:
        failed: why the divided replica failed; empty if it did not.
        whole_failed: why the whole replica failed; empty if it did not.
        comparison: of the leader; None if there is nothing to compare.
        findings: of the divided replica about the program.
        whole_findings: of the whole replica, at the leader.
    """

    failed: str = ""
    whole_failed: str = ""
    comparison: ReplicaComparison | None = None
    findings: Findings = Findings()
    whole_findings: Findings = Findings()

    @property
    def has_others(self) -> bool:
        """Whether the program trains on batches from elsewhere while a divided one is current."""
        return self.findings.has_others or self.whole_findings.has_others


class _Begun(NamedTuple):
    """Replicas that compute while the ranks train.

    Attributes:
        pids: process ids of this rank's replicas.
        folder: of their results; None if it could not be made.
        step: after which they were forked.
        failed: why there are none; empty if there are.
    """

    pids: list[int]
    folder: Path | None
    step: int
    failed: str = ""

    def remove_results(self) -> None:
        """Remove the folder."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


class LaterComparisons:
    """The later comparisons of a rank's program.

    Args:
        group: the ranks.
        may_differ: whether a difference is no error.
        read: reads the results of this rank's replicas from a folder.

    Attributes:
        has_others: whether the program trains on batches from elsewhere while a divided one is current.
    """

    def __init__(self, group: Group, *, may_differ: bool, read: Callable[[Path], Report]) -> None:
        self._group, self._may_differ, self._read = group, may_differ, read
        self._pending: list[_Begun] = []
        self._unchecked: dict[str, list[int]] = {}
        self._count = 0
        self._next_step, self._is_due = _FIRST_STEP, False
        self._chance = random.Random(0)
        self._seconds_per_sample = self._seconds = 0.0
        self.has_others = False

    def note(self, report: Report) -> None:
        """Note how long replicas computed, and whether the program has other batches."""
        self._seconds_per_sample = report.whole_findings.seconds_per_sample
        self._seconds = max(report.findings.seconds, report.whole_findings.seconds)
        self.has_others |= report.has_others

    def begin_if_due(
        self,
        fork: Callable[[str, Path, Extent], list[int]],
        *,
        step: int,
        is_due: bool,
        seconds: float,
        samples: int,
        minimum: int,
    ) -> None:
        """Begin a comparison if it is time; all ranks call this. If too many replicas compute, it is put off.

        Args:
            fork: forks this rank's replicas and returns their process ids; none in a replica.
            step: number of the last step.
            is_due: whether it is time for a reason of the program's, such as another epoch; alike on all ranks.
            seconds: of the run so far.
            samples: of a batch.
            minimum: smallest number of samples.

        Raises:
            NotExact: earlier replicas differ.
        """
        self.collect()
        self._is_due |= is_due or step > self._next_step
        is_small = is_due and self._count >= _AT_ONCE
        if not self._is_due or len(self._pending) >= (_SMALL_AT_ONCE if is_small else _AT_ONCE):
            return
        self._is_due, self._count = False, self._count + 1
        self._next_step = step + int(step * self._chance.uniform(1.0, _GROWTH)) + 1
        budget = 0.0 if is_small else max(_SECONDS, _FRACTION * seconds)
        batches = budget / max(self._seconds_per_sample * samples, 1e-9)
        proposal = (
            secrets.token_hex(8),
            max(minimum, int(samples * min(1.0, batches / MIN_ROUNDS))),
            max(MIN_ROUNDS, min(_MAX_ROUNDS, int(batches))),
        )
        message = self._group.broadcast(msgspec.json.encode(proposal), _TOPIC)
        token, limit, rounds = decode_json(message, tuple[str, int, int])
        is_short = self._seconds + self._seconds_per_sample * limit * rounds <= _SHORT_SECONDS
        extent = Extent(samples=limit, rounds=rounds, seed=step, in_background=True, is_short=is_short)
        folder: Path | None = None
        try:
            folder = Path(tempfile.mkdtemp(prefix="evener-", dir=launch_folder()))
            pids = fork(token, folder, extent)
        except (OSError, TrainingFailed) as error:  # the run can go on without this comparison
            self._pending.append(_Begun([], folder, step, first_line(error)))
        else:
            if pids:
                self._pending.append(_Begun(pids, folder, step))

    def collect(self, *, wait: bool = False) -> list[Event]:
        """Act on the results of replicas that have ended; all ranks call this equally often.

        Args:
            wait: whether to wait for them, for a while; those that still compute then are ended.

        Returns:
            After `wait`, notes for the user about replicas that have not finished.

        Raises:
            NotExact: the result differs from one process; raised on all ranks.
        """
        deadline = time.monotonic() + SECONDS if wait else None
        if wait:
            for one in self._pending:
                _hurry(one.pids)
        while self._pending and self._collect(self._pending[0], deadline):
            del self._pending[0]
        if not wait:
            return []
        reasons, self._unchecked = self._unchecked, {}
        heads = {reason: ", ".join(map(str, steps)) for reason, steps in reasons.items()}
        messages = [
            f"the run was not compared with one process after step {head}: {why}" for why, head in heads.items()
        ]
        return [Event(step=0, kind="unchecked", message=message) for message in messages]

    def abandon(self) -> None:
        """End the replicas, and remove their files: the run has failed."""
        for one in self._pending:
            kill(one.pids)
            one.remove_results()
        self._pending = []

    def _collect(self, one: _Begun, deadline: float | None) -> bool:
        """Act on the results of some replicas; return False if they have not ended. After `deadline` they are ended."""
        _remove_ended(one.pids)
        while one.pids and deadline is not None and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            _remove_ended(one.pids)
        is_late = bool(one.pids) and deadline is not None
        own: Report | None = None
        if one.failed:
            own = Report(failed=one.failed)
        elif is_late:
            own = Report(failed=_TOO_SLOW)
        elif not one.pids and one.folder is not None:
            own = self._read(one.folder)
        leaders = self._group.broadcast(b"" if own is None else msgspec.msgpack.encode(own), _TOPIC)
        if not leaders:
            return False
        kill(one.pids)  # the first node's result counts; its copy may have failed, and these would wait for it
        wait_for(one.pids)
        one.remove_results()
        report = decode_msgpack(leaders, Report)
        if report.comparison is None:
            self._unchecked.setdefault(report.whole_failed or report.failed, []).append(one.step)
            return True
        self.note(report)
        if report.comparison.sentence and not self._may_differ:
            raise NotExact(f"after step {one.step} {report.comparison.sentence}")
        return True


def wait_for(pids: Sequence[int]) -> None:
    """Wait until all processes have ended, which their alarm guarantees."""
    for pid in pids:
        os.waitpid(pid, 0)


def kill(pids: Sequence[int]) -> None:
    """End processes at once."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def _hurry(pids: Sequence[int]) -> None:
    """Let processes compute like others, where this one may decide that; the ranks have nothing else to do."""
    for pid in pids:
        with suppress(OSError, AttributeError):
            os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, pid, 0)


def _remove_ended(pids: list[int]) -> None:
    pids[:] = [pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0] == 0]
