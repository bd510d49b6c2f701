"""The loop through generations where each rank has the whole model: whoever has made the last step gives its state.

enter the next generation
agree                                on the state of the highest step; who is below it takes it over
    somebody is gone                 the step under way is done again

Nothing is voted upon, or sent besides, in steps that nothing disturbs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import torch
import torch.distributed as dist

from evener.data.sampler import Division
from evener.elastic.agreement import Agreement, Standing, agree
from evener.elastic.elastic_group import ElasticGroup
from evener.elastic.generation import Generation
from evener.oracle.apportion import Worker, apportion
from evener.oracle.rebalance import Balance
from evener.parallel.replicated import ReplicatedModel
from evener.plan import Assignment, Plan
from evener.run.config import RunConfig
from evener.run.elastic_loop import NO_STEP, ElasticLoop
from evener.run.elastic_telling import add_untold
from evener.run.held_state import HeldState
from evener.run.loop import Loop
from evener.run.state_transfer import send_state, take_state
from evener.run.training import Training, division_workers, follows_speeds, make_sampler


class ReplicatedElasticLoop(ElasticLoop):
    """One rank's loop through the generations of a run whose model each rank has.

    Args:
        training: with the plan that the run began with.
        config: of the run.
        ranks: that change.
        is_late: whether this rank comes when the run has begun.
        own_cost: what samples cost this rank's node, if that is none of the plan's.
    """

    def __init__(
        self,
        training: Training,
        config: RunConfig,
        ranks: ElasticGroup,
        is_late: bool,
        own_cost: Worker | None = None,
    ) -> None:
        super().__init__(training.group, training.plan, config, ranks)
        self._training, self._is_late = training, is_late
        assert isinstance(training.model, ReplicatedModel)
        self._model = training.model
        self._loop: Loop = Loop(training, config, ranks.fence, lambda: ranks.is_followed)
        self._own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        self._before = [buffer.clone() for buffer in self._model.buffers()]
        costs = division_workers(training.plan, follows_speeds(config, training.plan))
        self._costs = dict(zip([a.node for a in training.plan.assignments], costs, strict=True))
        if own_cost is not None:
            self._costs[training.context.env.node.name] = own_cost
        self._kept_for = NO_STEP  # the step before which buffers were kept

    def _begin_run(self) -> bool:
        if self._is_late:
            self._loop.last = NO_STEP
        else:
            self._start(self._loop)
        return not self._is_late

    def _before_step(self, step: int) -> None:
        """Keep statistics: the forward pass changes them, and it may have to be done again."""
        if self._before:
            torch._foreach_copy_(self._before, list(self._model.buffers()))
        self._kept_for = step

    def _after_step(self, loop: Loop) -> None:
        """Nothing: all others have the whole model, too."""

    def _enter(self) -> tuple[Loop, Training]:
        generation = self._ranks.enter()
        group = self._training.group
        own = Standing(step=self._loop.last, is_settled=self._is_settled)
        rows = group.all_gather_bytes(msgspec.json.encode(own))
        agreement = agree([msgspec.json.decode(row, type=Standing) for row in rows])
        self._divide(generation, agreement.source)
        self._take_over(agreement)
        self._tell(self._ranks.what_began(), self._loop, self._training)
        return self._loop, self._training

    def _divide(self, generation: Generation, source: int) -> None:
        """Divide samples among the ranks of `generation`, by what rank `source` knows of the nodes."""
        before, balance, group = self._training, self._loop.monitor.balance, self._training.group
        if balance is not None:
            self._costs |= dict(zip([a.node for a in before.plan.assignments], balance.workers, strict=True))
        rows = group.all_gather_bytes(msgspec.json.encode(self._costs))
        told = [msgspec.json.decode(row, type=dict[str, Worker]) for row in rows]
        self._costs = told[source]
        for node, own in zip(generation.nodes, told, strict=True):
            self._costs.setdefault(node, own[node])  # of one that is new, it alone knows them
        self._know_nodes()
        workers = tuple(self._costs[node] for node in generation.nodes)
        plan = plan_of(self._plan, generation.nodes, workers)
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
        self._loop.regroup(self._training, [a.node for a in self._plan.assignments])

    def _know_nodes(self) -> None:
        """Have the plan of the whole run name all nodes that ever came; if there are new ones, it is told again."""
        plan = with_nodes(self._plan, self._costs)
        if plan is not self._plan:
            self._plan = plan
            if self._training.group.is_leader:
                self._training.context.env.notify(plan)

    def _take_over(self, agreement: Agreement) -> None:
        """Be at the step that was agreed upon."""
        group, loop = self._training.group, self._loop
        if group.rank not in agreement.needy:
            if self._kept_for == loop.last + 1:
                for buffer, before in zip(self._model.buffers(), self._before, strict=True):
                    buffer.copy_(before)
            add_untold(loop.monitor.history, self._training.sampler, self._first, loop.last)
            self._settled = loop.last if agreement.is_settled else NO_STEP
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
                loop.last, self._kept_for = agreement.step, NO_STEP
                self._settled = loop.last if agreement.is_settled else NO_STEP


def with_nodes(plan: Plan, costs: Mapping[str, Worker]) -> Plan:
    """`plan` with those nodes of `costs` that it does not know, none of whose samples it has divided."""
    known = [one.node for one in plan.assignments]
    new = [node for node in costs if node not in known]
    if not new:
        return plan
    came = [
        Assignment(
            rank=len(known) + place,
            node=node,
            device=plan.assignments[0].device,
            samples=0,
            fixed_seconds=costs[node].fixed_seconds,
            sample_seconds=costs[node].unit_seconds,
            max_samples=costs[node].most,
            reason="came when the run had begun",
        )
        for place, node in enumerate(new)
    ]
    return msgspec.structs.replace(plan, assignments=(*plan.assignments, *came))


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
