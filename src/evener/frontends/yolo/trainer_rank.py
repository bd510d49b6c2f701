"""A rank's place in a training of Ultralytics: its group, its share of every batch, and its reports to the others."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from evener.comm.group import Group
from evener.data.sampler import MicroBatch
from evener.frontends.yolo.fingerprint import leave_data, require_same_data
from evener.frontends.yolo.generations import Generations
from evener.frontends.yolo.image_shares import ImageShares
from evener.frontends.yolo.remote_checkpoints import RemoteCheckpoints
from evener.frontends.yolo.searched_trial import SearchedTrial
from evener.frontends.yolo.sharded_loader import spare_bytes
from evener.launch.rank_environment import RankEnvironment
from evener.records.decoding import decode_msgpack
from evener.records.errors import NodeLost
from evener.records.plan import Plan
from evener.system.accelerators import is_accelerator
from evener.training.elastic.start import publish_state
from evener.training.step import StepResult


class TrainerRank:
    """The rank of a trainer of Ultralytics: shares for its loop, and reports from it. All ranks have one.

    Args:
        env: of the rank.
        group: all ranks.
        shares: `measured`, `equal`, or relative ones.
        is_stationary: whether every rank keeps to a class-balanced part of the images.
        late_plan: of a run that has begun without this rank; None for a run that begins with it.
        checkpoints: kept by the rank's master; None without a master.
        goes_on: whether a script of the user goes on with the result on every rank.
        trial: of a search; None for any other training.

    Attributes:
        trial: see above.
        work: which images each rank computes.
        folder: of the run, in which the leader writes; None: each rank keeps to its own.
        run_name: of the run, as trackers show it; empty for that of the folder in which the rank writes.
        generations: of a run that goes on without ranks that are gone; None: this one does not.
        is_late: whether the run has begun without this rank.
        is_first_here: whether this rank works for the others of its machine, where one has to.
    """

    def __init__(
        self,
        env: RankEnvironment,
        group: Group,
        shares: str,
        *,
        is_stationary: bool = False,
        late_plan: Plan | None = None,
        checkpoints: RemoteCheckpoints | None = None,
        goes_on: bool = False,
        trial: SearchedTrial | None = None,
    ) -> None:
        self.env, self.group, self.is_stationary, self.trial = env, group, is_stationary, trial
        self._checkpoints = checkpoints
        self.work = ImageShares(env, group, shares, is_stationary=is_stationary, late_plan=late_plan, goes_on=goes_on)
        self.folder: Path | None = None
        self.run_name = ""
        self.generations: Generations | None = None
        self.is_late = self._is_outside = late_plan is not None
        self._step = 1
        hosts = [node.host for node in env.nodes]
        self.is_first_here = hosts.index(env.node.host) == env.rank and not self.is_late
        can_abandon = group.sums is not None or group.process_group is None or not group.has_accelerators
        self._can_change = env.control is not None and can_abandon and not is_stationary
        group.is_elastic = self._can_change and self._has_others

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for all: shows the run, writes its files and runs its callbacks."""
        return self.group.is_leader and not self._is_outside

    @property
    def may_have_others(self) -> bool:
        """Whether other ranks take part, or may take part later in this training or trial."""
        return not self.group.is_alone or self.trial is not None

    @property
    def _has_others(self) -> bool:
        """Whether there are other ranks, or a master, whose nodes may come."""
        return self.is_late or self.group.size > 1 or self._checkpoints is not None

    def spare_bytes(self, workers: int) -> int:
        """Return the bytes of main memory in which each of `workers` loading processes may keep images."""
        limit = self.env.node.memory_bytes if self.env.device.type == "cpu" else None
        here = sum(node.host == self.env.node.host for node in self.env.nodes)
        return spare_bytes(limit) // (here * max(1, workers))

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Inside, one rank of every machine works before the others."""
        if not self.is_first_here:
            self.group.barrier()
        yield
        if self.is_first_here:
            self.group.barrier()

    def batch_of_all(self, own: int) -> int:
        """Return the images of a batch of all ranks, where this rank's device holds `own`.

        Where no rank has an accelerator, memory is not what limits a batch, and its size is that of one process.
        """
        if self.work.plan is not None:  # of a run that has begun
            return self.work.plan.batch_size
        rows = [decode_msgpack(row, int) for row in self.group.all_gather_bytes(msgspec.msgpack.encode(own))]
        held = [row for row, node in zip(rows, self.env.nodes, strict=True) if is_accelerator(node.device)]
        return sum(held) or rows[0]

    def common_precision(self, wanted: Any) -> Any:
        """Return `wanted` if all ranks can compute in half precision, which takes accelerators; else False."""
        return wanted if all(is_accelerator(node.device) for node in self.env.nodes) else False

    def all_say(self, vote: bool) -> bool:
        """Whether all ranks vote yes."""
        return all(row == b"1" for row in self.group.all_gather_bytes(b"1" if vote else b"0"))

    def of_leader(self, value: Any) -> Any:
        """Broadcast the plain value of the leader."""
        message = msgspec.msgpack.encode(value, enc_hook=float) if self.group.is_leader else b""
        return decode_msgpack(self.group.all_gather_bytes(message)[0]) if self.group.size > 1 else value

    def share_random_state(self) -> None:
        """Let all ranks draw first weights as the leader does, whose callbacks may have drawn or seeded."""
        state = self.of_leader(torch.get_rng_state().numpy().tobytes())
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def begin(self, trainer: Any, model: nn.Module) -> None:
        """Divide the batches of `trainer`, which has all that it needs.

        Raises:
            InvalidInput: the ranks would train different things.
            NotNeeded: this rank joins a run under way with other data, or batches take no longer without it.
        """
        self.work.begin(trainer, model, lambda: self.generations is not None and self.generations.is_followed)
        self.group.is_elastic = self._can_change and self._has_others
        if self.group.is_leader and not self.is_late:
            trainer.speak_for_all()  # the first rank may be left out
        if not self.group.is_elastic:
            return
        assert self.work.plan is not None
        assert self.env.store is not None
        if self.is_late:
            require_same_data(self.env.store, self.env.node.name, trainer)
        else:
            publish_state(self.env, self.group, self.work.plan, uses_all=False)
            if self.group.is_leader:
                leave_data(self.env.store, self.env.node.name, trainer)
        self.generations = Generations(self.env, self.group, self.work, trainer, is_late=self.is_late)

    def take_part(self, trainer: Any) -> None:
        """Begin where the run is: `trainer` has its model. A run that goes on without lost ranks has generations."""
        if self.trial is not None:
            self.trial.restore(trainer)
        if self.generations is None:
            return
        trainer.epoch = trainer.start_epoch
        state = b""
        if self._checkpoints is not None and self._checkpoints.resumes and not self.is_late:
            state = self._checkpoints.state()
            self._checkpoints.restore_results(trainer)
        self._is_outside = False
        self.generations.begin(state)

    def together(self, work: Callable[[], Any]) -> Any:
        """Return the plain values of `work`, which all ranks do; the remaining ranks repeat it if one is lost."""
        if self.generations is None:
            return work()
        while True:
            try:
                result = work()
            except (RuntimeError, NodeLost) as error:
                message = self.generations.go_on(error)
                if message is None:
                    continue
                result = decode_msgpack(message)
            self.generations.ended(msgspec.msgpack.encode(result, enc_hook=float))
            return result

    def fence(self) -> None:
        """Return once this rank is certainly a member; called before it changes weights or writes shared files."""
        if self.generations is not None:
            self.generations.fence()

    def begin_epoch(self) -> None:
        """Begin the batches of an epoch; time spent since the last one does not count to them."""
        if self.generations is not None:
            self.generations.begins_epoch()
        self.group.timer.discard()
        self.work.session.monitor.restart_clock()

    def restart_epoch(self, done: int) -> None:
        """Repeat an epoch that began after `done` batches."""
        if self.generations is not None:
            self.generations.restarts(done)

    def begin_batch(self, step: int) -> None:
        """Batch `step` of the training, from 1, is computed now."""
        self._step = step
        self.work.session.begin_step(step)
        if self.generations is not None:
            self.generations.at_batch(step)

    def end_batch(self, step: int, result: StepResult) -> bool:
        """Report it; whether a rank was asked to stop."""
        session, generations = self.work.session, self.generations
        if generations is None:
            session.end_step(step, result)
        elif step > generations.reported:
            generations.reported = step
            self._hear(lambda: session.end_step(step, result))
            if generations.batch == step:
                self._keep(step)
                if session.monitor.is_regrouping:
                    generations.admit()
        return session.monitor.is_stopping

    def leave(self, trainer: Any) -> str:
        """Write the results for the user who submitted the run; return how to resume, for a message."""
        if self._checkpoints is None:
            last = trainer.last
            return f"; go on with: evener yolo {trainer.args.task} train resume model={last}" if last.exists() else ""
        if self.group.is_leader:
            if self.trial is not None:
                self.trial.leave(trainer)
            self._checkpoints.leave(trainer)
        return ""

    def keep_last(self, step: int) -> bool:
        """Have the master keep a checkpoint after `step`, the last one of these ranks; all of them call this.

        Return whether they may stop: not while there are gradients that were not added up yet.
        """
        if self.generations is None or self._checkpoints is None:
            return True
        if self.generations.batch != step:
            return False
        if self.group.is_leader and not self._checkpoints.has(step):
            self._write_checkpoint(self._checkpoints, step)
        self.together(self.group.barrier)  # the end of one rank ends the others, and the leader would be writing
        return True

    def _write_checkpoint(self, checkpoints: RemoteCheckpoints, step: int) -> None:
        assert self.generations is not None
        event = checkpoints.write(self.generations.trainer, self.generations.state(), step)
        self.work.session.monitor.emit(event)

    def _keep(self, step: int) -> None:
        """Have the master keep a checkpoint after `step`, if one is due."""
        assert self.generations is not None
        if self._checkpoints is None or not self.group.is_leader:
            return
        if self._checkpoints.is_due(ends_epoch=self.generations.ends_epoch):
            self._write_checkpoint(self._checkpoints, step)

    def end_epoch(self) -> None:
        """Hear of all batches so far."""
        self._hear(self.work.session.monitor.settle)

    def _hear(self, hear: Callable[[], None]) -> None:
        """Receive reports of batches from the others; reports of a lost rank are lost with it."""
        try:
            hear()
        except (RuntimeError, NodeLost) as error:
            if self.generations is None:
                raise
            self.generations.go_on(error)

    def end_training(self) -> None:
        """All batches are computed."""
        if self.generations is not None:
            self.generations.is_over = True

    def sizes_now(self, count: int) -> Sequence[int]:
        """Images for every rank of `count` that are computed without gradients."""
        return self.work.division.parts(self._step, count)

    def end_validation(self, begin: float, part: MicroBatch, metrics: dict[str, float]) -> None:
        """Record a validation.

        Args:
            begin: when it began, by `time.perf_counter`.
            part: the last one of training before it.
            metrics: by name.
        """
        loss = sum(value for name, value in metrics.items() if name.startswith("val/"))
        seconds = time.perf_counter() - begin
        accuracy = metrics.get("metrics/accuracy_top1")
        loss = loss if isfinite(loss) else sys.float_info.max  # Ultralytics goes on, too
        self.work.session.validated(step=part.step, epoch=part.epoch, loss=loss, accuracy=accuracy, seconds=seconds)
