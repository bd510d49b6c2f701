"""Shares of images: each rank times the model, memory sets limits, and batches are divided from plan to record."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from evener.benchmark.dry_run import dry_run_of
from evener.benchmark.task_timing import time_task
from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.comm.traffic import Traffic
from evener.data.loader import Loader, collect
from evener.data.sampler import Division, Sampler, ShuffledSampler, StationarySampler
from evener.data.shares import class_balanced_shares
from evener.frontends.yolo.fingerprint import differing
from evener.frontends.yolo.step_gradients import cadence
from evener.launch.nodes import NodeSpec, relative_shares
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.apportion import NodeCost, apportion, weights_to_workers
from evener.oracle.cost.topology import LinkCost
from evener.oracle.data_parallel import GradientSync, with_lines
from evener.oracle.rebalance import Balance
from evener.records.errors import DoesNotFit, InvalidInput, NotNeeded
from evener.records.plan import Plan, Rejected
from evener.records.profile import TaskTiming
from evener.training.admission import exchange_of, publish_costs, require_beneficial, slowest_link
from evener.training.costs import (
    CALIBRATION_SECONDS,
    MEASURE_SECONDS,
    calibrate,
    gradient_bytes,
    gradient_sync,
    measure_ranks,
    measure_sums_of,
    memory_limit,
    worker_of,
)
from evener.training.elastic.plan import came, with_nodes
from evener.training.elastic.start import time_to_come
from evener.training.planning import Shape, divide, why_all_take_part
from evener.training.session import TrainingSession
from evener.training.training import division_workers


class ImageShares:
    """The shares of a training; all ranks have one, and change it alike.

    Args:
        env: of the rank.
        group: all ranks.
        shares: `measured`, `equal`, or relative shares.
        is_stationary: whether every rank keeps to a class-balanced part of the images.
        late_plan: of a run that has begun without this rank; None for a run that begins with it.
        goes_on: whether a script of the user goes on with the result on every rank.

    Attributes:
        division: of batches among the ranks.
        plan: who does how much; of all nodes, and as the run began.
        session: of this rank; there once the training begins.
    """

    session: TrainingSession

    def __init__(
        self,
        env: RankEnvironment,
        group: Group,
        shares: str,
        *,
        is_stationary: bool,
        late_plan: Plan | None,
        goes_on: bool = False,
    ) -> None:
        self._goes_on = goes_on
        self._env, self._group, self._shares, self._is_stationary = env, group, shares, is_stationary
        self.division = Division([NodeCost(unit_seconds=1.0)] * group.size)
        self.plan = late_plan
        self._costs: dict[str, NodeCost] = {}
        self._present: list[str] = []
        self._slowest_link: LinkCost | None = None

    @property
    def nodes(self) -> list[str]:
        """All that the plan knows, whether they are there or not."""
        assert self.plan is not None
        return [one.node for one in self.plan.assignments]

    def begin(self, trainer: Any, model: nn.Module, is_followed: Callable[[], bool]) -> None:
        """Divide the batches of `trainer`, which has all that it needs.

        Args:
            trainer: of Ultralytics.
            model: that it trains.
            is_followed: whether this rank knows that other ranks are to take part.

        Raises:
            InvalidInput: the ranks would train different things.
            NotNeeded: batches take no longer without this one; the others go on.
        """
        is_late = self.plan is not None
        if self.plan is None:
            if sentence := differing(self._group, trainer, model):
                raise InvalidInput(sentence)
            self.plan = self._divided(trainer, model)
            if self._group.is_leader:
                self._env.notify(self.plan)
        workers = division_workers(self.plan, self._follows_speeds)
        self._costs, self._present = dict(zip(self.nodes, workers, strict=True)), self.nodes
        own = self._env.node.name
        is_new = own not in self._costs
        if is_new:
            self._costs[own] = self._own_cost(trainer, model)
        self._slowest_link = self._compared(trainer, model, self._costs[own] if is_new else None, is_late=is_late)
        self.division.change(1, workers)
        self.session = TrainingSession(
            self._env,
            self._group,
            self.plan,
            division=self.division,
            balance=self._balance(workers, self.plan.replica_samples),
            lead=Loader.lead(trainer.train_loader.num_workers),
            refuses_non_finite=False,  # Ultralytics goes back to its last checkpoint
            is_followed=is_followed,
        )
        self._group.traffic = Traffic()  # what was sent to measure belongs to no batch
        self.session.start(trainer.start_epoch * len(trainer.train_loader) + 1)

    def _divided(self, trainer: Any, model: nn.Module) -> Plan:
        """The plan, whose ranks alone are in the group from now on. Raises NotNeeded: this rank is not."""
        group, size = self._group, trainer.train_loader.batch_size
        is_launched = self._env.tell is not None
        needs_all = self._is_stationary or self._goes_on or (self._env.control is None and not is_launched)
        make = partial(share_plan, self._env, group, trainer, model, size, self._shares)
        plan = make(needs_all=needs_all)
        has_begun = is_launched or trainer.has_user_callbacks
        needs_first = has_begun and self._env.names[0] not in [one.node for one in plan.assignments]
        plan = make(needs_all=True) if needs_first else plan
        reasons = {
            f"--shares {self._shares} gives each its part": self._shares != "measured",
            "--stationary leaves images on each": self._is_stationary,
            "the first rank that torchrun started, which would be left out, shows the run": needs_first and is_launched,
            "your callbacks have begun on the first node, which would be left out": needs_first and not is_launched,
            "the script goes on with the result on each": self._goes_on,
            "--no-elastic needs every node": needs_all,
        }
        plan = why_all_take_part(plan, reasons)
        if not group.narrow([group.nodes.index(one.node) for one in plan.assignments]):
            self.plan = plan
            raise NotNeeded("; ".join(one.reason for one in plan.rejected if one.what == self._env.node.name))
        return plan

    def _own_cost(self, trainer: Any, model: nn.Module) -> NodeCost:
        """Measure the cost of images on this node, which joins a run under way, while the others train.

        With shares of the user, it takes as many images as the others on average.
        """
        assert self.plan is not None
        size, shares = self.plan.batch_size, self.plan.replica_samples
        if not self._follows_speeds:
            return weights_to_workers([*shares, sum(shares) / len(shares)], [None] * (len(shares) + 1))[-1]
        return cost_here(self._env, trainer, model, size, -(-size // (len(shares) + 1)))

    def _compared(self, trainer: Any, model: nn.Module, cost: NodeCost | None, *, is_late: bool) -> LinkCost | None:
        """Return the slowest connection to the master, by which nodes that join are compared; None if none are.

        Raises:
            NotNeeded: this rank joins a run, at this `cost`, that has no shorter batches with it.
        """
        assert self.plan is not None
        env, plan, follows = self._env, self.plan, self._shares == "measured" and not self._is_stationary
        if not is_late:
            return slowest_link(env, self._group, plan, follows_speeds=follows)
        exchange = exchange_of(model, cadence(trainer, is_elastic=True).batches_of_exchange)
        return require_beneficial(env, plan, exchange, cost, follows_speeds=follows)

    @property
    def _follows_speeds(self) -> bool:
        """Whether shares are by how fast the nodes turn out to be."""
        return self._shares == "measured" and not self._group.is_alone and not self._is_stationary

    def _balance(self, workers: Sequence[NodeCost], shares: Sequence[int]) -> Balance | None:
        """Return the balance of ranks that share batches by measured cost; None if shares are fixed."""
        is_balanced = self._follows_speeds and len(workers) > 1
        return Balance(costs=tuple(workers), shares=tuple(shares)) if is_balanced else None

    def costs(self) -> dict[str, NodeCost]:
        """Return the current estimate of the cost of images on every node."""
        if self.session.monitor.balance is not None:
            self._costs |= dict(zip(self._present, self.session.monitor.balance.costs, strict=True))
        return self._costs

    def divide_among(self, nodes: Sequence[str], costs: Mapping[str, NodeCost]) -> None:
        """Divide batches among `nodes`, the ranks of the group from now on, by what images cost them."""
        assert self.plan is not None
        plan = with_nodes(self.plan, came(self.plan, costs))
        if plan is not self.plan:
            self.plan = plan
            if self._group.is_leader:
                self._env.notify(plan)
        self._costs, self._present = dict(costs), list(nodes)
        workers = tuple(costs[node] for node in nodes)
        self.division.change(1, workers)
        balance = self._balance(workers, apportion(self.plan.batch_size, workers))
        self.session.plan = self.plan
        self.session.monitor.regroup(self.division, balance, self.nodes, {})
        self.session.monitor.restart_clock()
        if self._group.is_leader:
            publish_costs(self._env.store, {node: costs[node] for node in nodes}, self._slowest_link)

    def train_sampler(self, dataset: Any, batch_size: int, seed: int) -> Sampler:
        """Which images of `dataset` this rank takes, batch by batch; the training has begun."""
        if not self._is_stationary:
            return ShuffledSampler(
                count=len(dataset),
                batch_size=batch_size,
                accumulate=1,
                seed=seed,
                rank=self._group.rank,
                division=self.division,
            )
        assert self.plan is not None
        shares = [assignment.samples for assignment in self.plan.assignments]
        parts = class_balanced_shares(image_classes(dataset), shares, seed)
        return StationarySampler(parts=parts, batch_size=batch_size, accumulate=1, seed=seed, rank=self._group.rank)


TimeSteps = Callable[[float, float, int], TaskTiming]
"""Times steps at a speed, for so many seconds, up to the number of images that is expected."""


def share_plan(
    env: RankEnvironment,
    group: Group,
    trainer: Any,
    model: nn.Module,
    batch_size: int,
    shares: str,
    *,
    needs_all: bool,
) -> Plan:
    """The plan of a training, the same on every rank; a rank that would make batches longer is left out.

    Args:
        env: of this rank.
        group: all ranks.
        trainer: with data and device.
        model: that it trains.
        batch_size: images of a batch, over all ranks.
        shares: `measured`, `equal`, or relative ones; all but the first let every rank take part.
        needs_all: whether every rank has to.

    Raises:
        DoesNotFit: the nodes together cannot hold a batch.
        InvalidValue: `shares` are not for so many ranks.
    """
    relative = relative_shares(shares, group.size)
    rows = tuple((rank,) for rank in range(group.size))
    is_free = all(node.memory_bytes is None and node.device == "cpu" for node in env.nodes)
    if is_free and (group.is_alone or relative is not None):  # nothing to find out
        shape = Shape("data", rows, 1, batch_size, relative or [1.0])
        return divide(shape, env.nodes, (), batch_size, GradientSync(gradient_bytes=gradient_bytes(model)))
    time_steps = partial(_time, env, trainer, model, batch_size)
    rhythm = cadence(trainer, is_elastic=group.is_elastic)
    expected = -(-batch_size // group.size)
    group.barrier()
    measure = partial(time_steps, group.timer.pace.speed, MEASURE_SECONDS, expected)
    measured = measure_ranks(env, group, measure, rhythm.batches_of_update)
    workers, misfits = measured.workers, measured.misfits
    if misfits and (needs_all or not workers):
        rank, why = next(iter(misfits.items()))
        raise DoesNotFit(f"node {env.nodes[rank].name}: {why}")
    nodes = [node for rank, node in enumerate(env.nodes) if rank not in misfits]
    relative = None if relative is None else [share for rank, share in enumerate(relative) if rank not in misfits]
    relative = relative if relative is None or any(relative) else [1.0] * len(nodes)
    rows = tuple((rank,) for rank in range(len(nodes)))
    sizes = relative or [float(size) for size in apportion(batch_size, workers)]
    calibrate(env, group, partial(_time_alone, time_steps, env, nodes, batch_size, sizes))
    sums = measure_sums_of(env, group, model)
    exchange = gradient_sync(group, model, sums)
    exchange = replace(
        exchange, gradient_bytes=round(exchange.gradient_bytes / rhythm.batches_of_exchange)
    )  # of a batch
    shape = Shape("data", rows, 1, batch_size, sizes if relative is not None or needs_all else None)
    plan = with_lines(divide(shape, nodes, workers, batch_size, exchange), exchange, sums.line_rates)
    out = (Rejected(what=env.nodes[rank].name, reason=why, is_node=True) for rank, why in misfits.items())
    return msgspec.structs.replace(
        plan,
        rejected=(*out, *plan.rejected),
        local_steps=trainer.accumulate,
        ring=sums.ring,
    )


def _time_alone(
    time_steps: TimeSteps, env: RankEnvironment, nodes: Sequence[NodeSpec], batch_size: int, sizes: Sequence[float]
) -> TaskTiming | None:
    """Time this rank's part of a batch at full speed; None if it has no part."""
    if env.node not in nodes:
        return None
    images = math.ceil(batch_size * sizes[nodes.index(env.node)] / sum(sizes))
    return time_steps(1.0, CALIBRATION_SECONDS, images)


def cost_here(env: RankEnvironment, trainer: Any, model: nn.Module, largest: int, expected: int) -> NodeCost:
    """Measure the cost of images on this rank's node.

    Args:
        env: of this rank.
        trainer: with data and device.
        model: that it trains.
        largest: number of images of a batch.
        expected: number of images of this rank.

    Raises:
        NotNeeded: it cannot hold the model and one image.
    """
    speed = env.node.speed_at(0)
    timing = time_to_come(lambda: _time(env, trainer, model, largest, speed, MEASURE_SECONDS, expected))
    return worker_of(timing, cadence(trainer, is_elastic=True).batches_of_update)


def _time(
    env: RankEnvironment, trainer: Any, model: nn.Module, largest: int, speed: float, seconds: float, expected: int
) -> TaskTiming:
    """Seconds of forward and backward by number of images, at a `speed`. Raises DoesNotFit."""
    dataset, collate = trainer.train_loader.dataset, trainer.train_loader.collate

    def loss_step(twin: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(env.device.type, enabled=bool(trainer.amp), dtype=_half(trainer)):
            loss: Tensor = twin(batch)[0].sum()
        return loss

    def fetch(count: int) -> Any:
        indices = np.arange(count, dtype=np.int64) % len(dataset)
        return trainer.preprocess_batch(collect(dataset, indices, trainer.args.seed, 0, collate))

    def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        adaptive = "betas" in trainer.optimizer.defaults
        return AdamW(trained, lr=1e-3) if adaptive else SGD(trained, lr=1e-3, momentum=0.9)

    with dry_run_of(model, make_optimizer, loss_step, fetch, env.device) as trial:
        return time_task(
            trial,
            StepTimer(env.device, speed),
            task=trainer.args.task,
            precision="fp16" if trainer.amp else "fp32",
            largest=largest,
            expected=expected,
            memory_limit=memory_limit(env),
            seconds=seconds,
        )


def _half(trainer: Any) -> torch.dtype:
    return torch.bfloat16 if trainer.args.amp == "bf16" else torch.float16


_NO_OBJECT = -1


def image_classes(dataset: Any) -> NDArray[np.int64]:
    """The class of every image of a data set of Ultralytics, [N]; -1 without an object.

    An image has many objects of some classes; common ones are in every share anyhow, so the rarest of its classes, by
    images that have it, decides.
    """
    if not hasattr(dataset, "labels"):
        return np.array([sample[1] for sample in dataset.samples], np.int64)
    classes_of_images = [np.unique(label["cls"]).astype(np.int64) for label in dataset.labels]
    classes, counts = np.unique(np.concatenate([*classes_of_images, np.empty(0, np.int64)]), return_counts=True)
    images = dict(zip(classes.tolist(), counts.tolist(), strict=True))
    rarest = [
        min(one_image.tolist(), key=lambda one: (images[one], one), default=_NO_OBJECT)
        for one_image in classes_of_images
    ]
    return np.array(rarest, np.int64)
