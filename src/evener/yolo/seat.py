"""A rank's place in a training of Ultralytics: its group, its share of every batch, and its reports to the others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from torch import nn

from evener.comm.group import Group
from evener.comm.traffic import Traffic
from evener.data.loader import Loader
from evener.data.sampler import Division, MicroBatch, Sampler, ShuffledSampler, StationarySampler
from evener.data.shares import class_balanced_shares
from evener.errors import InvalidInput
from evener.history import History
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.apportion import Worker
from evener.oracle.rebalance import Balance
from evener.plan import Plan
from evener.record import Validation
from evener.run.monitor import Monitor
from evener.run.step import StepResult
from evener.run.training import division_workers
from evener.yolo.cut_loader import spare_bytes
from evener.yolo.fingerprint import differing
from evener.yolo.image_classes import image_classes
from evener.yolo.shares import share_plan


class Seat:
    """What a rank's trainer is told, and tells; all ranks have one.

    Args:
        env: of the rank.
        group: all ranks.
        shares: `measured`, `equal`, or relative ones.
        is_stationary: whether every rank keeps to a class-balanced part of the images.

    Attributes:
        division: of batches among the ranks.
        plan: who does how much; there once the training begins.
        history: of the training.
    """

    def __init__(self, env: RankEnvironment, group: Group, shares: str, *, is_stationary: bool = False) -> None:
        self.env, self.group, self.is_stationary = env, group, is_stationary
        self.division = Division([Worker(unit_seconds=1.0)] * group.size)
        self.plan: Plan | None = None
        self.history = History()
        self._shares = shares
        self._monitor: Monitor | None = None
        self._step = 1
        hosts = [node.host for node in env.nodes]
        self._is_first_here = hosts.index(env.node.host) == env.rank

    @property
    def keeps_files(self) -> bool:
        """Whether this rank writes into the folder of the run: one rank of every machine does."""
        return self._is_first_here

    def spare_bytes(self, workers: int) -> int:
        """Of main memory, that each process which loads images may keep some in; there are `workers` besides a rank."""
        own = self.env.node.memory_bytes if self.env.device.type == "cpu" else None
        here = sum(node.host == self.env.node.host for node in self.env.nodes)
        return spare_bytes(own) // (here * max(1, workers))

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Inside, one rank of every machine works before the others."""
        if not self._is_first_here:
            self.group.barrier()
        yield
        if self._is_first_here:
            self.group.barrier()

    def common_precision(self, wanted: Any) -> Any:
        """What all ranks can compute in: half precision takes GPUs."""
        return wanted if all(node.device.startswith("cuda") for node in self.env.nodes) else False

    def all_say(self, own: bool) -> bool:
        """Whether all ranks say so."""
        return all(row == b"1" for row in self.group.all_gather_bytes(b"1" if own else b"0"))

    def of_leader(self, own: Any) -> Any:
        """The leader's plain value."""
        message = msgspec.msgpack.encode(own, enc_hook=float) if self.group.is_leader else b""
        return msgspec.msgpack.decode(self.group.all_gather_bytes(message)[0]) if self.group.size > 1 else own

    def begin(self, trainer: Any, model: nn.Module) -> None:
        """Divide the batches of `trainer`, which has all that it needs.

        Raises:
            InvalidInput: the ranks would train different things.
        """
        if sentence := differing(self.group, trainer, model):
            raise InvalidInput(sentence)
        loader, batch_size = trainer.train_loader, trainer.train_loader.batch_size
        self.plan = share_plan(self.env, self.group, trainer, model, batch_size, self._shares)
        is_balanced = self._shares == "measured" and self.group.size > 1 and not self.is_stationary
        workers = division_workers(self.plan, is_balanced)
        self.division.change(1, workers)
        self._monitor = Monitor(
            self.env,
            self.group,
            division=self.division,
            balance=Balance(workers=workers, shares=self.plan.replica_samples) if is_balanced else None,
            lead=Loader.lead(loader.num_workers),
            advice=None,  # Ultralytics goes back to its last checkpoint
        )
        self.history = self._monitor.history
        self.group.traffic = Traffic()  # what was sent to measure belongs to no batch
        if self.group.is_leader:
            self.env.notify(self.plan)
        self._monitor.start(trainer.start_epoch * len(loader) + 1)

    def train_sampler(self, dataset: Any, batch_size: int, seed: int) -> Sampler:
        """Which images of `dataset` this rank takes, batch by batch; the training has begun."""
        if not self.is_stationary:
            return ShuffledSampler(
                count=len(dataset),
                batch_size=batch_size,
                accumulate=1,
                seed=seed,
                rank=self.group.rank,
                division=self.division,
            )
        assert self.plan is not None
        shares = [assignment.samples for assignment in self.plan.assignments]
        parts = class_balanced_shares(image_classes(dataset), shares, seed)
        return StationarySampler(parts=parts, batch_size=batch_size, accumulate=1, seed=seed, rank=self.group.rank)

    def begin_epoch(self) -> None:
        """Its batches begin now: what was saved since the last one is no part of theirs."""
        assert self._monitor is not None
        self.group.timer.discard()
        self._monitor.restart_clock()

    def begin_batch(self, step: int) -> None:
        """Batch `step` of the training, from 1, is computed now."""
        self._step = step
        self.env.at_step(step)
        self.group.timer.pace.speed = self.env.node.speed_at(step)

    def end_batch(self, step: int, result: StepResult) -> bool:
        """Report it; whether a rank was asked to stop."""
        assert self._monitor is not None
        self._monitor.add(step, result)
        return self._monitor.is_stopping

    def end_epoch(self) -> None:
        """Hear of all batches so far."""
        assert self._monitor is not None
        self._monitor.settle()

    def sizes_now(self, count: int) -> Sequence[int]:
        """Images for every rank of `count` that are computed without gradients."""
        return self.division.parts(self._step, count)

    def end_validation(self, begin: float, part: MicroBatch, metrics: dict[str, float]) -> None:
        """Record a validation.

        Args:
            begin: when it began, by `time.perf_counter`.
            part: the last one of training before it.
            metrics: by name.
        """
        assert self._monitor is not None
        loss = sum(value for name, value in metrics.items() if name.startswith("val/"))
        seconds = time.perf_counter() - begin
        accuracy = metrics.get("metrics/accuracy_top1")
        self._monitor.emit(Validation(step=part.step, epoch=part.epoch, loss=loss, accuracy=accuracy, seconds=seconds))
