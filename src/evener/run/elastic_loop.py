"""The loop of a rank whose run goes on when others are gone: the same loop, in generations.

while steps are left:
    enter the next generation            new connections among the ranks that are there
    agree                                on the state of the highest step; who is below it takes it over
    train with new shares                from the step after it: the same samples as one process, so nothing is lost
        somebody is gone                 every wait for another rank raises; the step under way is done again
        somebody has come                the step is finished first

Nothing is voted upon, or sent besides, in steps that nothing disturbs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import torch
import torch.distributed as dist

from evener.data.sampler import Division
from evener.elastic.agreement import Agreement, Standing, agree
from evener.elastic.elastic_group import ElasticGroup
from evener.elastic.generation import Generation
from evener.errors import NodeLost
from evener.history import History
from evener.oracle.apportion import Worker, apportion
from evener.oracle.rebalance import Balance
from evener.parallel.replicated import ReplicatedModel
from evener.plan import Plan
from evener.run.config import RunConfig
from evener.run.elastic_telling import add_untold, tell_generation
from evener.run.held_state import HeldState
from evener.run.loop import Loop
from evener.run.state_transfer import send_state, take_state
from evener.run.training import Training, division_workers, follows_speeds, make_sampler

_NONE = -1
"""The last step of a rank that has no state yet."""


class ElasticLoop:
    """One rank's loop through the generations of a run.

    Args:
        training: with the plan that the run began with.
        config: of the run.
        ranks: that change.
        is_late: whether this rank comes when the run has begun.
    """

    def __init__(self, training: Training, config: RunConfig, ranks: ElasticGroup, is_late: bool) -> None:
        self._ranks, self._config, self._is_late = ranks, config, is_late
        self._whole, self._training = training, training
        assert isinstance(training.model, ReplicatedModel)
        self._model = training.model
        self._loop = Loop(training, config, ranks.fence, lambda: ranks.is_followed)
        self._own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        self._before = [buffer.clone() for buffer in self._model.buffers()]
        costs = division_workers(training.plan, follows_speeds(config, training.plan))
        self._costs = dict(zip([a.node for a in training.plan.assignments], costs, strict=True))
        self._before_step = _NONE
        self._was_ended = False  # by whoever watches the run
        self._settled = _NONE  # the last step after which all is done
        self._first, self._begin, self._mark = 1, 0.0, 0.0

    def run(self, finish: Callable[[Training, History], None]) -> None:
        """All steps to the last, and `finish`, which all ranks of the last generation call.

        Raises:
            NodeLost: nobody who is left holds the state, or the authority knows of nobody who is gone.
            Interrupted: a rank was asked to stop; a checkpoint is written.
        """
        if self._is_late:
            self._loop.last = _NONE
        else:
            self._first = self._loop.start()
            self._settled = self._loop.last
        self._ranks.start(() if self._is_late else tuple(self._training.group.nodes))
        self._begin = self._mark = time.perf_counter()
        with self._loop.saving.writing():
            is_over = False
            while not is_over:
                try:
                    self._enter()
                    is_over = self._train()
                    if is_over:
                        self._finish(finish)
                except (RuntimeError, NodeLost) as error:
                    is_over = False
                    self._ranks.require_broken(error)

    def _finish(self, finish: Callable[[Training, History], None]) -> None:
        self._loop.saving.settle()  # the record tells of them
        history = self._loop.monitor.history
        history.wall_seconds = time.perf_counter() - self._begin
        finish(replace(self._training, plan=self._whole.plan), history)
        self._training.group.barrier()

    def _train(self) -> bool:
        """Steps to the last; False if other ranks are to take part before."""
        loop, last = self._loop, self._training.num_steps
        loader = loop.loader(loop.last + 1)
        loop.monitor.start(loop.last + 1)
        if not self._is_settled:
            self._settle()
        while loop.last < last and not self._was_ended and not loop.monitor.is_leaving:
            self._keep_buffers()
            self._ranks.at_step(loop.last + 1)
            loop.one_step(loop.last + 1, loader)
            self._settle()
        loop.monitor.settle()
        return self._was_ended or loop.last == last

    def _settle(self) -> None:
        """Do what follows the last step; again, if somebody was lost meanwhile."""
        loop = self._loop
        history = loop.monitor.history
        history.validations = [one for one in history.validations if one.step != loop.last]
        self._was_ended = loop.after_step(loop.last)
        self._settled, self._mark = loop.last, time.perf_counter()

    @property
    def _is_settled(self) -> bool:
        return self._settled == self._loop.last

    def _keep_buffers(self) -> None:
        """Before a step that may have to be done again: its forward pass changes them."""
        if self._before:
            torch._foreach_copy_(self._before, list(self._model.buffers()))
        self._before_step = self._loop.last + 1

    def _enter(self) -> None:
        """Be a rank of the next generation, with the state that its ranks agree upon."""
        generation = self._ranks.enter()
        group = self._training.group
        own = Standing(step=self._loop.last, is_settled=self._is_settled)
        rows = group.all_gather_bytes(msgspec.json.encode(own))
        agreement = agree([msgspec.json.decode(row, type=Standing) for row in rows])
        self._divide(generation, agreement.source)
        self._take_over(agreement)
        self._note(self._ranks.what_began())
        self._ranks.has_state()
        if (heartbeat := self._training.context.env.heartbeat) is not None:
            heartbeat.stop()  # from now on it is the authority that listens

    def _divide(self, generation: Generation, source: int) -> None:
        """Divide samples among the ranks of `generation`, by what rank `source` knows of the nodes."""
        before, balance, group = self._training, self._loop.monitor.balance, self._training.group
        if balance is not None:
            self._costs |= dict(zip([a.node for a in before.plan.assignments], balance.workers, strict=True))
        told = group.all_gather_bytes(msgspec.json.encode(self._costs))[source]
        self._costs = msgspec.json.decode(told, type=dict[str, Worker])
        workers = tuple(self._costs[node] for node in generation.nodes)
        plan = plan_of(self._whole.plan, generation.nodes, workers)
        division = Division(workers)
        is_balanced = follows_speeds(self._config, plan) and group.size > 1
        self._model.regroup(self._own)
        self._training = replace(
            before,
            plan=plan,
            sampler=make_sampler(before.context, plan, group.rank, division),
            division=division,
            balance=Balance(workers=workers, shares=plan.replica_samples) if is_balanced else None,
        )
        self._loop.regroup(self._training, [a.node for a in self._whole.plan.assignments])

    def _take_over(self, agreement: Agreement) -> None:
        """Be at the step that was agreed upon."""
        group, loop = self._training.group, self._loop
        if group.rank not in agreement.needy:
            if self._before_step == loop.last + 1:
                for buffer, before in zip(self._model.buffers(), self._before, strict=True):
                    buffer.copy_(before)
            add_untold(loop.monitor.history, self._training.sampler, self._first, loop.last)
            self._settled = loop.last if agreement.is_settled else _NONE
        if agreement.needy and group.mesh is not None:
            if group.rank == agreement.source:
                loop.monitor.history.wall_seconds = time.perf_counter() - self._begin
                held = HeldState.of(self._training, loop.state(loop.last), loop.monitor.history)
                send_state(held, group.mesh, agreement.needy)
            elif group.rank in agreement.needy:
                held = take_state(group.mesh, agreement.source)
                held.restore(self._training)
                history = loop.monitor.history = held.history
                self._mark = time.perf_counter()  # what was lost before, those know who have been there
                self._begin = self._mark - history.wall_seconds
                loop.last, self._before_step = agreement.step, _NONE
                self._settled = loop.last if agreement.is_settled else _NONE

    def _note(self, generation: Generation) -> None:
        """Have the record say what happened, and what it cost."""
        self._mark = tell_generation(
            generation,
            self._ranks,
            self._loop.monitor,
            self._training.group,
            self._mark,
            len(self._costs),
            self._loop.last,
        )


def plan_of(plan: Plan, nodes: Sequence[str], workers: Sequence[Worker]) -> Plan:
    """`plan` with `nodes` alone, some of its own in whatever order, and samples by what these cost the `workers`."""
    assignments = {assignment.node: assignment for assignment in plan.assignments}
    shares = apportion(plan.micro_batch_size, workers)
    return msgspec.structs.replace(
        plan,
        assignments=tuple(
            msgspec.structs.replace(assignments[node], rank=rank, samples=samples)
            for rank, (node, samples) in enumerate(zip(nodes, shares, strict=True))
        ),
    )
