"""The comparison of a program's steps with one process, before its first step and again later.

When the program is about to take its first batch, every rank forks a replica, and the leader a second one:

    divided    a replica of every rank: they continue together, with a few unevenly divided samples of the first batches
    whole      a replica of the leader: it continues alone, with all of those samples
    the ranks  wait; the leader compares gradients, buffers and weights, and broadcasts the result

The replicas run the program's own code, so users need not write a function for the comparison, and the ranks repeat
nothing. Replicas draw the same random numbers for every sample. If the two differ, the local gradients show the kind of
loss: a sum, a mean over something else than samples, or a loss between samples.

The check repeats while the ranks train (`later_comparisons`), because some differences appear later.

On slowed nodes, another replica times a step undisturbed, one node after the other.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from evener.comm.group import Group
from evener.frontends.programs.accelerate_alone import refuse_accelerate
from evener.frontends.programs.cpu_check import CheckResult, Command, CpuCheck, end_cpu_check, is_cpu_check
from evener.frontends.programs.equivalence_probe import EquivalenceProbe, Extent, Findings, read_facts, read_findings
from evener.frontends.programs.forked_replica import ForkedReplica, failure, forked
from evener.frontends.programs.later_comparisons import MIN_ROUNDS, LaterComparisons, Report, kill, wait_for
from evener.frontends.programs.refusal_causes import alike_outside
from evener.frontends.programs.replica_comparison import ReplicaComparison, judge
from evener.frontends.programs.timing_probe import TimingProbe
from evener.frontends.programs.work_division import Prepared
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.apportion import NodeCost, apportion
from evener.records.decoding import decode_json, decode_msgpack
from evener.records.errors import InvalidInput, NodeLost, NotExact, TrainingFailed
from evener.records.events import Phase
from evener.records.plan import Check
from evener.records.profile import TaskTiming
from evener.records.record import Event
from evener.records.single_sample_error import is_of_lone_sample
from evener.system.process_exit import launch_folder
from evener.training.costs import CALIBRATION_SECONDS, calibrate

_SAMPLES, _MORE = 2, 2
"""Samples of every rank, and additional ones of the first."""
_WHOLE_BATCH = 2**31
"""Largest number of samples if a few give no finite numbers, as when all classes have to be in a batch."""
_CPU_CHECK_TOPIC = "the check on CPUs"
_LONE_TOPIC = "a batch of one sample"


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
        has_others: whether it is known to train on batches from elsewhere while a divided one is current.
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
        self.is_delayed = self.has_others = False
        self._owners: set[object] = set()
        self._is_timed = False
        self._precision = ""
        self._alike: list[str] | None = None
        self._few = _SAMPLES * group.size + _MORE
        self._later = LaterComparisons(
            group, may_differ=may_differ, read=lambda folder: self._report(folder, is_wide=True)
        )
        self._notes: list[Event] = []
        self._cpu_check: CpuCheck | None = None
        self._cannot_begin = "it was not started"

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
        can_copy = not self._group.has_accelerators and hasattr(os, "fork")
        if self.is_wanted and not can_copy:
            self._take_result_of_cpus()
            self.is_wanted = False
        if lone and not can_copy:
            for model in models:
                model.refuse_lone_sample(lone)
        elif lone and self.is_wanted:
            self._refuse_lone_sample(models, optimizers, lone)
        if self.is_wanted and self.replica is None:
            self._compare_here(models, optimizers)
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
        if self._precision == "fp64" and self.replica is None:
            self._later.begin_if_due(
                partial(self._copies, models, optimizers),
                step=step,
                is_due=is_due,
                seconds=seconds,
                samples=samples,
                minimum=self._few,
            )
            self.has_others |= self._later.has_others

    def collect(self) -> list[Event]:
        """Wait for later comparisons, for a while; return notes for the user. All ranks call this at the end.

        Raises:
            NotExact: the result differs from one process; raised on all ranks.
        """
        return self._later.collect(wait=True) if self.replica is None else []

    def abandon(self) -> None:
        """End later comparisons without a result: the run has failed."""
        if self.replica is None:
            self._later.abandon()
        if self._cpu_check is not None:
            self._cpu_check.end()

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
                wait_for([pid])
            reason = failure(path).encode() if self._group.is_leader else b""
            failed = self._group.broadcast(reason, _LONE_TOPIC).decode()
        if is_of_lone_sample(failed):
            raise InvalidInput(lone)

    def begin_on_cpus(self, command: Command) -> None:
        """Start the check by `command`, which starts ranks on CPUs, if this is the first rank, and any uses a GPU."""
        if self.is_wanted and self._group.has_accelerators and self._group.is_leader:
            try:
                self._cpu_check = CpuCheck(command)
            except InvalidInput as error:  # a task that cannot be sent to another process
                self._cannot_begin = str(error)

    def _take_result_of_cpus(self) -> None:
        """Wait for the check on CPUs, and act on its result; all ranks call this. Raises NotExact."""
        begin = time.perf_counter()
        result: CheckResult | str = self._cannot_begin
        if self._cpu_check is not None:
            self._env.notify(Phase(what="checking", detail="on CPUs that these nodes learn what one process learns"))
            result = self._cpu_check.result()
        message = self._group.broadcast(msgspec.json.encode(result), _CPU_CHECK_TOPIC)
        result = decode_json(message, CheckResult | str)
        if isinstance(result, str):
            what = "a process that uses an accelerator cannot be forked, and a run on CPUs gave no comparison"
            self._note("unchecked", f"{what}: {result}")
            return
        if result.refusal:
            raise NotExact(result.refusal)
        self._notes += result.notes
        self.shared_draws |= frozenset(result.shared_draws)
        self.is_delayed |= result.is_delayed
        self.has_others |= result.has_others
        if result.check is not None:
            self.check = msgspec.structs.replace(result.check, seconds=time.perf_counter() - begin)

    def _compare_here(self, models: Sequence[Prepared], optimizers: Sequence[Optimizer]) -> None:
        """Compare by replicas of this rank; a check on CPUs ends with the result, in all of its ranks."""
        refusal = ""
        try:
            self._compare(models, optimizers)
        except NotExact as error:
            if not is_cpu_check():
                raise
            refusal = str(error)
        if is_cpu_check() and self.replica is None:
            result = CheckResult(
                refusal=refusal,
                check=self.check,
                notes=tuple(self._notes),
                shared_draws=tuple(self.shared_draws),
                is_delayed=self.is_delayed,
                has_others=self.has_others,
            )
            end_cpu_check(result, is_leader=self._group.is_leader)

    def _compare(self, models: Sequence[Prepared], optimizers: Sequence[Optimizer]) -> None:
        begin = time.perf_counter()
        if self._group.is_leader:
            self._env.notify(Phase(what="checking", detail="that these nodes learn what one process learns"))
        few = self._few
        comparison: ReplicaComparison | None = None
        for precision, samples in (("fp64", few), ("fp64", _WHOLE_BATCH), ("own", few)):
            if samples == _WHOLE_BATCH and comparison is None:
                continue  # a few samples could not be computed, so more cannot either
            reports = self._round(models, optimizers, samples, is_wide=precision == "fp64")
            if self.replica is not None:
                return
            self.shared_draws |= frozenset.intersection(*(frozenset(one.findings.drawn) for one in reports))
            self.is_delayed = any(report.findings.is_delayed for report in reports)
            self.has_others |= any(report.has_others for report in reports)
            comparison, whole_failed = reports[0].comparison, reports[0].whole_failed
            failed = _first_hand([report.failed for report in reports if report.failed])
            is_conclusive = comparison is not None and (comparison.is_finite or samples == _WHOLE_BATCH)
            if not whole_failed and (is_conclusive or precision == "own"):
                break
        if comparison is None:
            self._without_comparison(failed, whole_failed)
        else:
            self._precision = precision
            self._later.note(reports[0])
            self._act_on(comparison, precision, time.perf_counter() - begin)

    def sizes(self, count: int) -> tuple[int, ...]:
        """Return every rank's samples of a small batch of `count`: uneven, and none for a rank without a share."""
        shares = self._shares or [1.0] * self._group.size
        workers = [NodeCost(unit_seconds=1.0, max_units=None if share else 0) for share in shares]
        sizes = list(apportion(max(0, count - _MORE), workers))
        sizes[next(i for i, share in enumerate(shares) if share)] += min(count, _MORE)
        return tuple(sizes)

    def _round(
        self, models: Sequence[Prepared], optimizers: Sequence[Optimizer], samples: int, *, is_wide: bool
    ) -> list[Report]:
        """Return the reports of all ranks' replicas with at most `samples` of a batch; empty in a replica."""
        token = self._group.broadcast(secrets.token_hex(8).encode()).decode()
        extent = Extent(samples=samples, rounds=MIN_ROUNDS, is_wide=is_wide)
        with self._folder() as folder:
            pids = self._copies(models, optimizers, token, folder, extent)
            if self.replica is not None:
                return []
            wait_for(pids)
            report = self._report(folder, is_wide)
        return [decode_msgpack(row, Report) for row in self._group.all_gather_bytes(msgspec.msgpack.encode(report))]

    def _copies(
        self, models: Sequence[Prepared], optimizers: Sequence[Optimizer], token: str, folder: Path, extent: Extent
    ) -> list[int]:
        """Fork this rank's replicas and return their process ids; in a replica, set `replica` and return."""
        pids: list[int] = []
        for role in ("divided", "whole") if self._group.is_leader else ("divided",):
            try:
                pid = forked()
            except (OSError, TrainingFailed):
                kill(pids)
                wait_for(pids)
                raise
            if pid == 0:
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
            wait_for([pid])
            return None if failure(path) else decode_json(path.read_bytes(), TaskTiming)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """Create a folder for replicas; the rank removes it at the end."""
        folder = Path(tempfile.mkdtemp(prefix="evener-", dir=launch_folder()))
        try:
            yield folder
        finally:
            if self.replica is None:
                shutil.rmtree(folder, ignore_errors=True)

    def _report(self, folder: Path, is_wide: bool) -> Report:
        divided, whole = folder / "divided.safetensors", folder / "whole.safetensors"
        failed = failure(divided)
        findings = Findings() if failed else read_findings(divided)
        if not self._group.is_leader:
            return Report(failed=failed, findings=findings)
        whole_failed = failure(whole)
        if failed or whole_failed:
            return Report(failed=failed, whole_failed=whole_failed, findings=findings)
        comparison = judge(divided, whole, is_wide, self._layers, self._alike)
        if self._alike is None:
            self._alike = alike_outside(read_facts(divided))
        return Report(comparison=comparison, findings=findings, whole_findings=read_findings(whole))

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
            samples=self.sizes(self._few),
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
