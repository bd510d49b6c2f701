"""Which images each rank computes now, and what is known of how long that takes: from the plan to the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from evener.comm.group import Group
from evener.comm.traffic import Traffic
from evener.data.loader import Loader
from evener.data.sampler import Division, Sampler, ShuffledSampler, StationarySampler
from evener.data.shares import class_balanced_shares
from evener.frontends.yolo.fingerprint import differing
from evener.frontends.yolo.image_classes import image_classes
from evener.frontends.yolo.shares import cost_here, share_plan
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.apportion import Worker, apportion, weights_to_workers
from evener.oracle.rebalance import Balance
from evener.records.errors import InvalidInput, NotNeeded
from evener.records.history import History
from evener.records.plan import Plan
from evener.training.elastic.plan import came, with_nodes
from evener.training.monitor import Monitor
from evener.training.planning import why_all_take_part
from evener.training.training import division_workers


class ImageShares:
    """The shares of a training; all ranks have one, and change it alike.

    Args:
        env: of the rank.
        group: all ranks.
        asked: `measured`, `equal`, or relative shares.
        is_stationary: whether every rank keeps to a class-balanced part of the images.
        left: the plan of a run that has begun without this rank; None of one that begins with it.

    Attributes:
        division: of batches among the ranks.
        plan: who does how much; of all nodes, and as the run began.
        monitor: of the batches; there once the training begins.
    """

    monitor: Monitor

    def __init__(
        self, env: RankEnvironment, group: Group, asked: str, *, is_stationary: bool, left: Plan | None
    ) -> None:
        self._env, self._group, self._asked, self._is_stationary = env, group, asked, is_stationary
        self.division = Division([Worker(unit_seconds=1.0)] * group.size)
        self.plan = left
        self._costs: dict[str, Worker] = {}
        self._present: list[str] = []

    @property
    def history(self) -> History:
        """Of the training."""
        return self.monitor.history

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
        if self.plan is None:
            if sentence := differing(self._group, trainer, model):
                raise InvalidInput(sentence)
            self.plan = self._divided(trainer, model)
            if self._group.is_leader:
                self._env.notify(self.plan)
        workers = division_workers(self.plan, self._follows_speeds)
        self._costs, self._present = dict(zip(self.nodes, workers, strict=True)), self.nodes
        if self._env.node.name not in self._costs:
            self._costs[self._env.node.name] = self._own_cost(trainer, model)
        self.division.change(1, workers)
        self.monitor = Monitor(
            self._env,
            self._group,
            division=self.division,
            balance=self._balance(workers, self.plan.replica_samples),
            lead=Loader.lead(trainer.train_loader.num_workers),
            advice=None,  # Ultralytics goes back to its last checkpoint
            is_followed=is_followed,
        )
        self._group.traffic = Traffic()  # what was sent to measure belongs to no batch
        self.monitor.start(trainer.start_epoch * len(trainer.train_loader) + 1)

    def _divided(self, trainer: Any, model: nn.Module) -> Plan:
        """The plan, whose ranks alone are in the group from now on. Raises NotNeeded: this rank is not."""
        group, size = self._group, trainer.train_loader.batch_size
        is_launched = self._env.tell is not None
        needs_all = self._is_stationary or (self._env.line is None and not is_launched)
        make = partial(share_plan, self._env, group, trainer, model, size, self._asked)
        plan = make(needs_all=needs_all)
        needs_first = is_launched and self._env.names[0] not in [one.node for one in plan.assignments]
        plan = make(needs_all=True) if needs_first else plan
        reasons = {
            f"--shares {self._asked} gives each its part": self._asked != "measured",
            "--stationary leaves images on each": self._is_stationary,
            "the first rank that torchrun started, which would be left out, shows the run": needs_first,
            "--no-elastic needs every node": needs_all,
        }
        plan = why_all_take_part(plan, reasons)
        if not group.narrow([group.nodes.index(one.node) for one in plan.assignments]):
            self.plan = plan
            raise NotNeeded("; ".join(one.reason for one in plan.rejected if one.what == self._env.node.name))
        return plan

    def _own_cost(self, trainer: Any, model: nn.Module) -> Worker:
        """What images cost this rank's node, which the run began without, measured while the others train.

        Where the user named shares, it is to have as many as the others have on the average.
        """
        assert self.plan is not None
        size, shares = self.plan.batch_size, self.plan.replica_samples
        if not self._follows_speeds:
            return weights_to_workers([*shares, sum(shares) / len(shares)], [None] * (len(shares) + 1))[-1]
        return cost_here(self._env, trainer, model, size, -(-size // (len(shares) + 1)))

    @property
    def _follows_speeds(self) -> bool:
        """Whether shares are by how fast the nodes turn out to be."""
        return self._asked == "measured" and not self._group.is_alone and not self._is_stationary

    def _balance(self, workers: Sequence[Worker], shares: Sequence[int]) -> Balance | None:
        """Of ranks that share batches by what these cost them."""
        is_balanced = self._follows_speeds and len(workers) > 1
        return Balance(workers=tuple(workers), shares=tuple(shares)) if is_balanced else None

    def costs(self) -> dict[str, Worker]:
        """What images cost every node, as far as it is known now."""
        if self.monitor.balance is not None:
            self._costs |= dict(zip(self._present, self.monitor.balance.workers, strict=True))
        return self._costs

    def divide_among(self, nodes: Sequence[str], costs: Mapping[str, Worker]) -> None:
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
        self.monitor.regroup(self.division, balance, self.nodes, {})
        self.monitor.restart_clock()

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
