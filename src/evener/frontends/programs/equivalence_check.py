"""The comparison of a program's steps with one process, before its first step and again later.

When the program is about to take its first batch, every rank forks a replica, and the leader a second one:

    divided    a replica of every rank: they continue together, with a few unevenly divided samples of the first batches
    whole      a replica of the leader: it continues alone, with all of those samples
    the ranks  wait; the leader compares gradients, buffers and weights, and broadcasts the result

The replicas run the program's own code, so users need not write a function for the comparison, and the ranks repeat
nothing. Replicas draw the same random numbers for every sample. If the two differ, the local gradients show the kind of
loss: a sum, a mean over something else than samples, or a loss between samples.

The check repeats when the second epoch begins, at growing intervals after it, when the last epoch begins, and when the
program computes its loss in another way, because some differences appear later, such as a rare class or loss weights
that follow the epoch. The ranks then train while replicas compute.

On slowed nodes, another replica times a step undisturbed, one node after the other.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from evener.comm.group import Group
from evener.frontends.programs.accelerate_alone import refuse_accelerate
from evener.frontends.programs.equivalence_probe import EquivalenceProbe, Extent, Findings, read_facts, read_findings
from evener.frontends.programs.forked_replica import SECONDS, ForkedReplica, failure, forked
from evener.frontends.programs.refusal_causes import alike_outside
from evener.frontends.programs.replica_comparison import ReplicaComparison, judge
from evener.frontends.programs.timing_probe import TimingProbe
from evener.frontends.programs.work_division import Prepared
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.apportion import Worker, apportion
from evener.records.errors import InvalidInput, NodeLost, NotExact
from evener.records.events import Phase
from evener.records.plan import Check
from evener.records.profile import TaskTiming
from evener.records.record import Event
from evener.records.single_sample_error import is_of_lone_sample
from evener.training.costs import CALIBRATION_SECONDS, calibrate

_SAMPLES, _MORE = 2, 2
"""Samples of every rank, and additional ones of the first."""
_WHOLE_BATCH = 2**31
"""Largest number of samples if a few give no finite numbers, as when all classes have to be in a batch."""
_LATER_ROUNDS, _LATER_AT_ONCE = 8, 3
"""Largest number of batches of a later comparison, and how many compute at a time."""
_LATER_SECONDS, _LATER_FRACTION = 0.3, 0.01
"""Processor time of a later comparison's whole replica: seconds, or a fraction of the run so far if that is more."""
_SHORT_SECONDS = 0.15
"""Processor time of a replica that need not wait for an idle CPU."""
_SMALL_AT_ONCE = 6
"""Comparisons that compute at a time while another one of few samples may begin."""
_ROUNDS = 2
"""Smallest number of batches that lead to an update: in one, a wrong divisor may be right by chance."""
_TOPIC, _LONE_TOPIC = "the comparison of a later step", "a batch of one sample"
_LOOK_SECONDS = 0.01
_FIRST_STEP, _GROWTH = 25, 3.0
"""Step after which the program is compared again, and the growth of the intervals after it."""


class Report(msgspec.Struct, frozen=True):
    """The results of a rank's replicas.

    Attributes:
        failed: why the divided replica failed; empty if it did not.
        whole_failed: why the whole replica failed; empty if it did not.
        comparison: of the leader; None if there is nothing to compare.
        findings: of the divided replica about the program.
    """

    failed: str = ""
    whole_failed: str = ""
    comparison: ReplicaComparison | None = None
    findings: Findings = Findings()


class _Later(NamedTuple):
    """Replicas that compute while the ranks train.

    Attributes:
        pids: process ids of this rank's replicas.
        folder: of their results.
        step: after which they were forked.
        begun: when, by `time.monotonic`.
    """

    pids: list[int]
    folder: Path
    step: int
    begun: float


class EquivalenceCheck:
    """The equivalence check of a rank's program.

    Args:
        env: of this rank.
        group: the ranks.
        shares: of the ranks; None if all have some.
        is_wanted: whether to compare.
        may_differ: whether a difference is a warning instead of an error.
        layers: strategy that divides layers; None if batches are divided.

    Attributes:
        replica: the role of this process if it is a forked replica; None in a rank.
        check: result of the last comparison; None without one.
        is_wanted: whether to compare.
        shared_draws: known shapes of random numbers that all samples share.
        is_delayed: whether the program is known to compute batches later than it loads them.
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
        self.replica: ForkedReplica | None = None
        self.check: Check | None = None
        self.shared_draws: frozenset[tuple[int, ...]] = frozenset()
        self.is_delayed = False
        self._owners: set[object] = set()
        self._is_timed = False
        self._precision = ""
        self._alike: list[str] | None = None
        self._seconds_per_sample, self._replica_seconds = 0.0, 0.0
        self._unfinished: list[int] = []
        self._later: list[_Later] = []
        self._num_later = 0
        self._next_step, self._is_due = _FIRST_STEP, False
        self._chance = random.Random(0)
        self._notes: list[Event] = []

    def is_new(self, owner: object) -> bool:
        """Whether the program has not trained on batches of `owner` before."""
        if self._group.size == 1 or self.replica is not None or owner in self._owners:
            return False
        self._owners.add(owner)
        return True

    def perform(self, models: Sequence[Prepared], optimizers: Sequence[Optimizer], lone: str = "") -> list[Event]:
        """Compare, and time slowed nodes; return notes for the user. In a replica, this returns at once.

        Args:
            models: of the program.
            optimizers: of the program.
            lone: message if a model fails at a batch of one sample, which comes later; empty without such a batch.

        Raises:
            NotExact: the result would differ from one process; raised on all ranks.
            InvalidInput: another library divides the batches, too; or a batch has one sample and a model needs more.
        """
        refuse_accelerate()
        self._notes = []
        can_copy = self._group.device.type == "cpu" and hasattr(os, "fork")
        if self.is_wanted and not can_copy:
            self._note("unchecked", "a process on a GPU cannot be forked: the run was not compared with one process")
            self.is_wanted = False
        if lone and not can_copy:
            for model in models:
                model.refuse_lone_sample(lone)
        elif lone and self.is_wanted:
            self._refuse_lone_sample(models, optimizers, lone)
        if self.is_wanted and self.replica is None:
            self._compare(models, optimizers)
        if can_copy and self.replica is None and not self._is_timed and self._layers is None:
            self._is_timed = True
            calibrate(self._env, self._group, self._time_alone)  # a replica does not wait
        return self._notes

    def compare_later(
        self,
        models: Sequence[Prepared],
        optimizers: Sequence[Optimizer],
        *,
        step: int,
        is_due: bool,
        seconds: float,
        samples: int,
    ) -> None:
        """Compare again if it is time, while the ranks train; in a replica, this returns at once. All ranks call this.

        After the first ones, a comparison by `is_due` takes few samples; if too many replicas compute, it is put off.

        Args:
            models: of the program.
            optimizers: of the program.
            step: number of the last step.
            is_due: whether it is time for a reason of the program's, such as another epoch; alike on all ranks.
            seconds: of the run so far.
            samples: of a batch.

        Raises:
            NotExact: earlier replicas differ.
        """
        if self._precision != "fp64" or self.replica is not None:
            return
        self.collect()
        self._is_due |= is_due or step > self._next_step
        is_small = is_due and self._num_later >= _LATER_AT_ONCE
        if not self._is_due or len(self._later) >= (_SMALL_AT_ONCE if is_small else _LATER_AT_ONCE):
            return
        self._is_due, self._num_later = False, self._num_later + 1
        self._next_step = step + int(step * self._chance.uniform(1.0, _GROWTH)) + 1
        minimum = _SAMPLES * self._group.size + _MORE
        budget = 0.0 if is_small else max(_LATER_SECONDS, _LATER_FRACTION * seconds)
        batches = budget / max(self._seconds_per_sample * samples, 1e-9)
        proposal = (
            secrets.token_hex(8),
            max(minimum, int(samples * min(1.0, batches / _ROUNDS))),
            max(_ROUNDS, min(_LATER_ROUNDS, int(batches))),
        )
        message = self._group.broadcast(msgspec.json.encode(proposal), _TOPIC)
        token, limit, rounds = msgspec.json.decode(message, type=tuple[str, int, int])
        is_short = is_small and self._replica_seconds <= _SHORT_SECONDS
        extent = Extent(samples=limit, rounds=rounds, seed=step, in_background=True, is_short=is_short)
        folder = Path(tempfile.mkdtemp(prefix="evener-"))
        pids = self._copies(models, optimizers, token, folder, extent)
        if self.replica is None:
            self._later.append(_Later(pids, folder, step, time.monotonic()))

    def collect(self, wait: bool = False) -> list[Event]:
        """Act on the results of replicas that have ended; all ranks call this equally often.

        Args:
            wait: whether to wait for them, for a while; those that still compute then are ended.

        Returns:
            After `wait`, notes for the user about replicas that have not finished.

        Raises:
            NotExact: the result differs from one process; raised on all ranks.
        """
        deadline = time.monotonic() + SECONDS if wait else None
        while self._later and self.replica is None and self._collect(self._later[0], deadline):
            del self._later[0]
        if not wait or not self._unfinished:
            return []
        steps, self._unfinished = ", ".join(map(str, self._unfinished)), []
        message = f"comparisons with one process after steps {steps} did not finish, as other processes used the CPUs"
        return [Event(step=0, kind="unchecked", message=message)]

    def _collect(self, later: _Later, deadline: float | None) -> bool:
        """Act on the results of some replicas; return False if they have not ended. After `deadline` they are ended."""
        _remove_ended(later.pids)
        while later.pids and deadline is not None and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            _remove_ended(later.pids)
        has_ended = not later.pids or deadline is not None
        leaders = self._group.broadcast(self._encoded_report(later.folder) if has_ended else b"", _TOPIC)
        if not leaders:
            return False
        if deadline is not None:
            for pid in later.pids:
                os.kill(pid, signal.SIGKILL)
        _wait(later.pids)
        shutil.rmtree(later.folder, ignore_errors=True)
        report = msgspec.msgpack.decode(leaders, type=Report)
        if report.comparison is None and time.monotonic() - later.begun >= SECONDS:
            self._unfinished.append(later.step)
        if report.comparison is not None and report.comparison.sentence and not self._may_differ:
            raise NotExact(f"after step {later.step} {report.comparison.sentence}")
        return True

    def _encoded_report(self, folder: Path) -> bytes:
        return msgspec.msgpack.encode(self._report(folder, is_wide=True))

    def _refuse_lone_sample(self, models: Sequence[Prepared], optimizers: Sequence[Optimizer], lone: str) -> None:
        """Raise InvalidInput by `lone` if BatchNorm fails with one sample; in a replica, return at once."""
        if not any(isinstance(module, _BatchNorm) for model in models for module in model.model.modules()):
            return
        extent = Extent(samples=1, rounds=1, is_wide=False)
        with self._folder() as folder:
            if self._group.is_leader:
                path = (folder / "lone").with_suffix(".safetensors")
                if (pid := forked()) == 0:
                    self.replica = EquivalenceProbe(models, self._group, path, extent, self.sizes, optimizers)
                    self.replica.begin(self._env, None)
                    return
                _wait([pid])
            reason = failure(path).encode() if self._group.is_leader else b""
            failed = self._group.broadcast(reason, _LONE_TOPIC).decode()
        if is_of_lone_sample(failed):
            raise InvalidInput(lone)

    def _compare(self, models: Sequence[Prepared], optimizers: Sequence[Optimizer]) -> None:
        begin = time.perf_counter()
        if self._group.is_leader:
            self._env.notify(Phase(what="checking", detail="that these nodes learn what one process learns"))
        few = _SAMPLES * self._group.size + _MORE
        comparison: ReplicaComparison | None = None
        for precision, samples in (("fp64", few), ("fp64", _WHOLE_BATCH), ("own", few)):
            if samples == _WHOLE_BATCH and comparison is None:
                continue  # a few samples could not be computed, so more cannot either
            reports = self._round(models, optimizers, samples, is_wide=precision == "fp64")
            if self.replica is not None:
                return
            self.shared_draws |= frozenset.intersection(*(frozenset(one.findings.drawn) for one in reports))
            self.is_delayed = any(report.findings.is_delayed for report in reports)
            comparison, whole_failed = reports[0].comparison, reports[0].whole_failed
            failed = _first_hand([report.failed for report in reports if report.failed])
            is_conclusive = comparison is not None and (comparison.is_finite or samples == _WHOLE_BATCH)
            if not whole_failed and (is_conclusive or precision == "own"):
                break
        if comparison is None:
            self._without_comparison(failed, whole_failed)
        else:
            self._precision = precision
            self._act_on(comparison, precision, time.perf_counter() - begin)

    def sizes(self, count: int) -> tuple[int, ...]:
        """Return every rank's samples of a small batch of `count`: uneven, and none for a rank without a share."""
        shares = self._shares or [1.0] * self._group.size
        workers = [Worker(unit_seconds=1.0, max_units=None if share else 0) for share in shares]
        sizes = list(apportion(max(0, count - _MORE), workers))
        sizes[next(i for i, share in enumerate(shares) if share)] += min(count, _MORE)
        return tuple(sizes)

    def _round(
        self, models: Sequence[Prepared], optimizers: Sequence[Optimizer], samples: int, *, is_wide: bool
    ) -> list[Report]:
        """Return the reports of all ranks' replicas with at most `samples` of a batch; empty in a replica."""
        token = self._group.broadcast(secrets.token_hex(8).encode()).decode()
        extent = Extent(samples=samples, rounds=_ROUNDS, is_wide=is_wide)
        with self._folder() as folder:
            pids = self._copies(models, optimizers, token, folder, extent)
            if self.replica is not None:
                return []
            _wait(pids)
            report = self._report(folder, is_wide)
        return [
            msgspec.msgpack.decode(row, type=Report)
            for row in self._group.all_gather_bytes(msgspec.msgpack.encode(report))
        ]

    def _copies(
        self, models: Sequence[Prepared], optimizers: Sequence[Optimizer], token: str, folder: Path, extent: Extent
    ) -> list[int]:
        """Fork this rank's replicas and return their process ids; in a replica, set `replica` and return."""
        pids: list[int] = []
        for role in ("divided", "whole") if self._group.is_leader else ("divided",):
            if (pid := forked()) == 0:
                path, moves = (folder / role).with_suffix(".safetensors"), self._layers is not None
                sizes: Callable[[int], tuple[int, ...]] = self.sizes
                self.replica = EquivalenceProbe(models, self._group, path, extent, sizes, optimizers, moves)
                self.replica.begin(self._env, None if role == "whole" else token)
                return []
            pids.append(pid)
        return pids

    def _time_alone(self) -> TaskTiming | None:
        """Return the timing of this rank while no other rank computes; None in a replica, or if it failed."""
        with self._folder() as folder:
            path = folder / "alone.json"
            if (pid := forked()) == 0:
                self.replica = TimingProbe(self._group, path, CALIBRATION_SECONDS)
                self.replica.begin(self._env)
                return None
            _wait([pid])
            return None if failure(path) else msgspec.json.decode(path.read_bytes(), type=TaskTiming)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """Create a folder for replicas; the rank removes it at the end."""
        folder = Path(tempfile.mkdtemp(prefix="evener-"))
        try:
            yield folder
        finally:
            if self.replica is None:
                shutil.rmtree(folder, ignore_errors=True)

    def _report(self, folder: Path, is_wide: bool) -> Report:
        divided, whole = folder / "divided.safetensors", folder / "whole.safetensors"
        failed = failure(divided)
        findings = Findings() if failed else read_findings(divided)
        self._replica_seconds = findings.seconds
        if not self._group.is_leader:
            return Report(failed=failed, findings=findings)
        whole_failed = failure(whole)
        if failed or whole_failed:
            return Report(failed=failed, whole_failed=whole_failed, findings=findings)
        of_whole = read_findings(whole)
        self._seconds_per_sample, self._replica_seconds = of_whole.seconds_per_sample, of_whole.seconds
        comparison = judge(divided, whole, is_wide, self._layers, self._alike)
        if self._alike is None:
            self._alike = alike_outside(read_facts(divided))
        return Report(failed=failed, whole_failed=whole_failed, comparison=comparison, findings=findings)

    def _without_comparison(self, failed: str, whole_failed: str) -> None:
        if whole_failed:
            self._note("unchecked", f"a step of a few samples fails also in one process ({whole_failed})")
        elif self._may_differ:
            self._note("approximate", f"a divided step cannot be computed ({failed})")
        else:
            raise NotExact(_failure(failed, self._layers))

    def _act_on(self, comparison: ReplicaComparison, precision: str, seconds: float) -> None:
        if comparison.sentence and not self._may_differ:
            raise NotExact(comparison.sentence)
        if comparison.sentence:
            self._note("approximate", comparison.sentence)
        self.check = Check(
            samples=self.sizes(_SAMPLES * self._group.size + _MORE),
            precisions=(precision,),
            where=comparison.where,
            off=comparison.off,
            seconds=seconds,
        )

    def _note(self, kind: str, message: str) -> None:
        self._notes.append(Event(step=0, kind=kind, message=message))


def _first_hand(failures: Sequence[str]) -> str:
    """Return the failure that caused the others, not that of a replica that lost another one; empty without one."""
    return min(failures, key=lambda failure: failure.startswith(f"{NodeLost.__name__}:"), default="")


def _failure(failed: str, layers: str | None) -> str:
    """Return the message for replicas that failed at divided steps, while the whole step succeeded."""
    if layers is None:
        return f"the program fails with a part of a batch, though not with the whole: {failed}"
    return f"--strategy {layers} cannot divide this program: {failed}; leave it out, and nodes divide its batches"


def _remove_ended(pids: list[int]) -> None:
    pids[:] = [pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0] == 0]


def _wait(pids: Sequence[int]) -> None:
    """Wait until all processes have ended, which their alarm guarantees."""
    for pid in pids:
        os.waitpid(pid, 0)
