"""Holds a step of the program, as its author wrote it, against one process, before the first step.

When the program is about to take its first batch, every rank forks a copy of itself, and the leader a second one:

    divided    a copy of every rank: they go on together, with a few samples of the first batches, unevenly divided
    whole      a copy of the leader: it goes on alone, with all of those samples
    the ranks  wait; the leader compares gradients, buffers and weights, and tells all of them what it found

So whatever the program does with a batch is what is compared, nothing of it is done twice, and nobody had to write a
function for it. What is random is drawn alike for every sample. Where the two differ, the gradients that the parts have
by themselves tell what the loss is: a sum, a mean over something else than samples, or a loss between samples.

What differs later only (a class that is rare, weights of losses that follow an epoch) is looked for again when the
second epoch begins, and after a few steps: then the ranks train on while copies compute, and hear of it later.

Of a node that is slowed down, another copy tells what a step takes undisturbed, one node after the other.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
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
from evener.frontends.programs.compared_copy import ComparedCopy, Extent, Findings, found_by, read_facts
from evener.frontends.programs.refusal_causes import alike_outside
from evener.frontends.programs.timed_copy import TimedCopy
from evener.frontends.programs.understudy import Understudy, failure, forked
from evener.frontends.programs.verdict import Verdict, judge
from evener.frontends.programs.work_division import Prepared
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.apportion import Worker, apportion
from evener.records.errors import InvalidInput, NodeLost, NotExact
from evener.records.events import Phase
from evener.records.plan import Check
from evener.records.profile import TaskTiming
from evener.records.record import Event
from evener.training.costs import CALIBRATION_SECONDS, calibrate
from evener.training.lone_sample import is_of_lone_sample

_SAMPLES, _MORE = 2, 2
"""Of every rank, and of the first one besides."""
_WHOLE_BATCH = 2**31
"""Samples, at most, where a few of them give no numbers: such as of classes that all have to be in a batch."""
_LATER_ROUNDS, _LATER_SECONDS = 8, 1.5
"""Batches of a comparison that is made later, at most, and how long it may compute."""
_ROUNDS = 2
"""Batches that lead to an update, at least: in one a mean over something else than samples may be right by chance."""
_TOPIC, _LONE_TOPIC = "the comparison of a later step", "a batch of one sample"
_STEPS_OF_WHOLE = 4.0
"""Times as long as a step of the run, the same samples may take a copy: in double precision, in the background."""
_FIRST_STEP, _GROWTH = 25, 3.0
"""Step after which the program is compared again, and by what factor such steps grow apart."""


class Report(msgspec.Struct, frozen=True):
    """What a rank's copies came to.

    Attributes:
        failed: how the copy that divides failed; empty if it did not.
        whole_failed: likewise the one that does the whole.
        verdict: of the leader; None where there is nothing to compare.
        found: what the copy that divides found out about the program.
    """

    failed: str = ""
    whole_failed: str = ""
    verdict: Verdict | None = None
    found: Findings = Findings()


class _Later(NamedTuple):
    """Copies that compute while the ranks train on.

    Attributes:
        pids: of this rank's.
        folder: where they write.
        step: after which they were made.
    """

    pids: list[int]
    folder: Path
    step: int


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
        shared_draws: shapes of random numbers that the program draws for no samples, as far as that is known.
        is_delayed: whether the program computes batches later than it loads them, likewise.
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
        self.shared_draws: frozenset[tuple[int, ...]] = frozenset()
        self.is_delayed = False
        self._owners: set[object] = set()
        self._is_timed = False
        self._precision = ""
        self._alike: list[str] | None = None
        self._later: _Later | None = None
        self._next_step = _FIRST_STEP
        self._chance = random.Random(0)
        self._notes: list[Event] = []

    def is_new(self, owner: object) -> bool:
        """Whether the program has not trained on batches of `owner` before."""
        if self._group.size == 1 or self.understudy is not None or owner in self._owners:
            return False
        self._owners.add(owner)
        return True

    def perform(self, models: Sequence[Prepared], optimizers: Sequence[Optimizer], lone: str = "") -> list[Event]:
        """Compare, and time slowed nodes; in a copy, this returns at once. What the user is to be told.

        Args:
            models: of the program.
            optimizers: of the program.
            lone: what to say if a model cannot be given a batch of one sample, where an epoch ends with such; or empty.

        Raises:
            NotExact: the ranks would train something else than one process; all of them raise it.
            InvalidInput: another library divides the batches, too; or a batch has one sample, and a model needs more.
        """
        refuse_accelerate()
        self._notes = []
        can_copy = self._group.device.type == "cpu" and hasattr(os, "fork")
        if self.is_wanted and not can_copy:
            self._note("unchecked", "a process that uses a GPU cannot be copied: nobody compared this with one process")
            self.is_wanted = False
        if self.is_wanted and lone:
            self._refuse_lone_sample(models, optimizers, lone)
        if self.is_wanted and self.understudy is None:
            self._compare(models, optimizers)
        if can_copy and self.understudy is None and not self._is_timed and self._layers is None:
            self._is_timed = True
            calibrate(self._env, self._group, self._time_alone)  # in a copy, nobody is waited for
        return self._notes

    def compare_later(
        self,
        models: Sequence[Prepared],
        optimizers: Sequence[Optimizer],
        *,
        step: int,
        is_epoch: bool,
        seconds: float,
        samples: int,
    ) -> None:
        """Compare again if it is time, while the ranks train on; in a copy, this returns at once. All ranks call this.

        Args:
            models: of the program.
            optimizers: likewise.
            step: that is over.
            is_epoch: whether another epoch begins.
            seconds: of a step of the run.
            samples: of a batch.

        Raises:
            NotExact: copies that were made before differ.
        """
        if self._precision != "fp64" or self.understudy is not None:
            return
        self.collect()
        if not is_epoch and step < self._next_step:
            return
        while step >= self._next_step:
            self._next_step += int(step * self._chance.uniform(1.0, _GROWTH)) + 1
        if self._later is not None:
            return
        least = _SAMPLES * self._group.size + _MORE
        affordable = _LATER_SECONDS / max(seconds * _STEPS_OF_WHOLE, 1e-9)  # batches
        own = (
            secrets.token_hex(8),
            max(least, int(samples * min(1.0, affordable / _ROUNDS))),
            max(_ROUNDS, min(_LATER_ROUNDS, int(affordable))),
        )
        message = self._group.told_by_leader(msgspec.json.encode(own), _TOPIC)
        token, limit, rounds = msgspec.json.decode(message, type=tuple[str, int, int])
        extent = Extent(samples=limit, rounds=rounds, seed=step, in_background=True)
        folder = Path(tempfile.mkdtemp(prefix="evener-"))
        pids = self._copies(models, optimizers, token, folder, extent)
        if self.understudy is None:
            self._later = _Later(pids, folder, step)

    def collect(self, wait: bool = False) -> None:
        """Act on copies that computed meanwhile, if they are done; all ranks call this equally often.

        Args:
            wait: for them.

        Raises:
            NotExact: the ranks train something else than one process; all of them raise it.
        """
        later = self._later
        if later is None or self.understudy is not None:
            return
        later.pids[:] = [pid for pid in later.pids if os.waitpid(pid, 0 if wait else os.WNOHANG)[0] == 0]
        own = b"" if later.pids else msgspec.msgpack.encode(self._report(later.folder, is_wide=True))
        told = self._group.told_by_leader(own, _TOPIC)
        if not told:
            return
        _wait(later.pids)
        self._later = None
        shutil.rmtree(later.folder, ignore_errors=True)
        verdict = msgspec.msgpack.decode(told, type=Report).verdict
        if verdict is not None and verdict.sentence and not self._may_differ:
            raise NotExact(f"after step {later.step} {verdict.sentence}")

    def _refuse_lone_sample(self, models: Sequence[Prepared], optimizers: Sequence[Optimizer], lone: str) -> None:
        """Raise InvalidInput by `lone` if the program fails at BatchNorm with one sample; in a copy, return at once."""
        if not any(isinstance(module, _BatchNorm) for model in models for module in model.model.modules()):
            return
        extent = Extent(samples=1, rounds=1, is_wide=False)
        with self._folder() as folder:
            if self._group.is_leader:
                path = (folder / "lone").with_suffix(".safetensors")
                if (pid := forked()) == 0:
                    self.understudy = ComparedCopy(models, self._group, path, extent, self.sizes, optimizers)
                    self.understudy.begin(self._env, None)
                    return
                _wait([pid])
            own = failure(path).encode() if self._group.is_leader else b""
            failed = self._group.told_by_leader(own, _LONE_TOPIC).decode()
        if is_of_lone_sample(failed):
            raise InvalidInput(lone)

    def _compare(self, models: Sequence[Prepared], optimizers: Sequence[Optimizer]) -> None:
        begin = time.perf_counter()
        if self._group.is_leader:
            self._env.notify(Phase(what="checking", detail="that these nodes learn what one process learns"))
        few = _SAMPLES * self._group.size + _MORE
        verdict: Verdict | None = None
        for precision, samples in (("fp64", few), ("fp64", _WHOLE_BATCH), ("own", few)):
            if samples == _WHOLE_BATCH and verdict is None:
                continue  # a few samples could not be computed, so more cannot either
            reports = self._round(models, optimizers, samples, is_wide=precision == "fp64")
            if self.understudy is not None:
                return
            self.shared_draws |= frozenset.intersection(*(frozenset(one.found.drawn) for one in reports))
            self.is_delayed = any(report.found.is_delayed for report in reports)
            verdict, whole_failed = reports[0].verdict, reports[0].whole_failed
            failed = _first_hand([report.failed for report in reports if report.failed])
            is_telling = verdict is not None and (verdict.is_finite or samples == _WHOLE_BATCH)
            if not whole_failed and (is_telling or precision == "own"):
                break
        if verdict is None:
            self._without_verdict(failed, whole_failed)
        else:
            self._precision = precision
            self._act_on(verdict, precision, time.perf_counter() - begin)

    def sizes(self, count: int) -> tuple[int, ...]:
        """Samples for every rank of a small batch of `count`: uneven, and none where the user grants none."""
        shares = self._shares or [1.0] * self._group.size
        workers = [Worker(unit_seconds=1.0, max_units=None if share else 0) for share in shares]
        sizes = list(apportion(max(0, count - _MORE), workers))
        sizes[next(i for i, share in enumerate(shares) if share)] += min(count, _MORE)
        return tuple(sizes)

    def _round(
        self, models: Sequence[Prepared], optimizers: Sequence[Optimizer], samples: int, *, is_wide: bool
    ) -> list[Report]:
        """What all ranks' copies came to with so many samples of a batch, at most; nothing in a copy."""
        token = self._group.told_by_leader(secrets.token_hex(8).encode()).decode()
        extent = Extent(samples=samples, rounds=_ROUNDS, is_wide=is_wide)
        with self._folder() as folder:
            pids = self._copies(models, optimizers, token, folder, extent)
            if self.understudy is not None:
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
        """The copies of this rank, which have begun; in each of them, this rank is that copy."""
        pids: list[int] = []
        for role in ("divided", "whole") if self._group.is_leader else ("divided",):
            if (pid := forked()) == 0:
                path, moves = (folder / role).with_suffix(".safetensors"), self._layers is not None
                sizes: Callable[[int], tuple[int, ...]] = self.sizes
                self.understudy = ComparedCopy(models, self._group, path, extent, sizes, optimizers, moves)
                self.understudy.begin(self._env, None if role == "whole" else token)
                return []
            pids.append(pid)
        return pids

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
        found = Findings() if failed else found_by(divided)
        if not self._group.is_leader:
            return Report(failed=failed, found=found)
        whole_failed = failure(whole)
        if failed or whole_failed:
            return Report(failed=failed, whole_failed=whole_failed, found=found)
        verdict = judge(divided, whole, is_wide, self._layers, self._alike)
        if self._alike is None:
            self._alike = alike_outside(read_facts(divided))
        return Report(failed=failed, whole_failed=whole_failed, verdict=verdict, found=found)

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
