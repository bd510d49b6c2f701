"""The elastic loop for replicas: each rank has the whole model, and the rank with the last step gives its state.

    enter the next generation
    choose_resume_point                  on the state of the highest step; the other ranks load it
        a rank joins                     it loads the state while the others train
        a rank is lost                   the current step is repeated, if no rank has finished it

Undisturbed steps need no vote and no extra message. A rank that joins takes part in steps before it has the state:

    step t         a rank that has made it copies the state; a thread sends the copy
    t+1, t+2 ...   the others train. The new rank has no samples, and its weights are not yet those of the others: what
                   it adds to sums counts for nothing. It keeps the sums of gradients
    the state of t is there
                   the rank makes the steps t+1, t+2 ... from the sums that it has kept, and is where the others are
    later          all others have read that in its report, and it has samples

No rank waits, and the steps are those of one process. After every step, the giver sends running statistics, which do
not follow from gradients, until the new rank reports that it has caught up.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from evener.comm.mesh import Mesh
from evener.config.run_config import RunConfig
from evener.data.sampler import Division
from evener.membership.elastic_group import ElasticGroup
from evener.membership.generation import Generation
from evener.membership.resume_point import RankProgress, ResumePoint, choose_resume_point
from evener.membership.side_channel import SideChannel
from evener.oracle.apportion import NodeCost, apportion
from evener.oracle.cost.topology import LinkCost
from evener.oracle.rebalance import Balance
from evener.parallel.replicated import ReplicatedModel
from evener.records.decoding import decode_json, decode_msgpack
from evener.records.errors import NodeLost
from evener.records.history import History
from evener.records.plan import Plan
from evener.training.admission import publish_costs
from evener.training.elastic.held_state import HeldState
from evener.training.elastic.loop import NO_STEP, ElasticLoop
from evener.training.elastic.loss_events import add_untold
from evener.training.elastic.plan import came, with_nodes
from evener.training.elastic.state_transfer import send_state, take_state
from evener.training.loop import Loop
from evener.training.training import Training, division_workers, follows_speeds, make_sampler

_STEP = struct.Struct("<q")
_FEWEST_KEPT, _KEPT_BYTES = 4, 2**30
"""Sums of gradients that are kept, at most: so many steps', or so many bytes, whichever is more."""


class Giver:
    """The sender of this rank's current state to another rank.

    Args:
        membership: of this rank in the generation.
        rank: this rank.
        taker: the other one.
        held: a copy of the state.
        buffers: of the model.
    """

    def __init__(
        self, membership: ElasticGroup, rank: int, taker: int, held: HeldState, buffers: Iterable[Tensor]
    ) -> None:
        self.taker = taker
        self._held: HeldState | None = held
        self._sent = [buffer.clone() for buffer in buffers]
        self._channel = membership.side_channel(rank, taker, self._give)

    def made(self, step: int, buffers: Iterable[Tensor]) -> None:
        """Send the buffers after `step`. Raise the error of the transfer if it failed."""
        if self._channel.error is not None and not isinstance(self._channel.error, NodeLost):
            raise self._channel.error
        changed = {
            str(i): now.detach().contiguous()
            for i, (now, sent) in enumerate(zip(buffers, self._sent, strict=True))
            if not torch.equal(now, sent)
        }
        self._channel.inbox.put(_STEP.pack(step) + save(changed))

    def end(self) -> None:
        """End the transfer: the other rank has caught up."""
        self._channel.inbox.put(None)

    def _give(self, mesh: Mesh, channel: SideChannel) -> None:
        assert self._held is not None
        send_state(self._held, mesh, 1)
        self._held = None
        while (message := channel.inbox.get()) is not None:
            mesh.send_to(1, message)


class Taker:
    """The receiver of another rank's state, and of the changes since.

    Args:
        membership: of this rank in the generation.
        giver: the other rank.
        rank: this rank.
        training: that is to have the state.
    """

    def __init__(self, membership: ElasticGroup, giver: int, rank: int, training: Training) -> None:
        self._training = training
        self._kept: deque[tuple[int, list[Tensor | None]]] = deque()
        self._held: HeldState | None = None
        self._after = (-1, b"")  # the last step of the giver's, and its buffers
        self._channel = membership.side_channel(giver, rank, self._take)

    @property
    def has_come(self) -> bool:
        """Whether the state is here. Raises the error of a failed transfer."""
        if self._channel.error is not None and self._held is None:
            raise self._channel.error
        return self._held is not None

    @property
    def is_full(self) -> bool:
        """Whether the buffer of gradients is full."""
        one = sum(0 if grad is None else grad.nbytes for _, grads in list(self._kept)[:1] for grad in grads)
        return len(self._kept) >= max(_FEWEST_KEPT, _KEPT_BYTES // max(1, one))

    def keep(self, step: int) -> None:
        """Keep the gradients of `step`, which are complete."""
        grads = [None if p.grad is None else p.grad.detach().clone() for p in self._training.model.parameters()]
        self._kept.append((step, grads))

    def catch_up(self, make: Callable[[int], None]) -> None:
        """Reach the step of the others; wait for the state if necessary. Raise the error of a failed transfer.

        Args:
            make: makes a step from the current gradients.
        """
        self._channel.wait_for(lambda: self._held is not None)
        assert self._held is not None
        self._held.restore(self._training)
        last = self._kept[-1][0] if self._kept else None
        while self._kept:
            step, grads = self._kept.popleft()
            for parameter, grad in zip(self._training.model.parameters(), grads, strict=True):
                parameter.grad = grad
            make(step)
        if last is not None:
            self._channel.wait_for(lambda: self._after[0] == last)  # the giver sends no other before this rank joins
            _put(load(self._after[1]), list(self._training.model.buffers()))

    def _take(self, mesh: Mesh, channel: SideChannel) -> None:
        held = take_state(mesh, 0)
        self._tell(channel, held, self._after)
        while True:  # until the giver, or the generation, ends it
            message = mesh.receive_from(0)
            (step,) = _STEP.unpack(message[: _STEP.size])
            self._tell(channel, held, (step, message[_STEP.size :]))

    def _tell(self, channel: SideChannel, held: HeldState, after: tuple[int, bytes]) -> None:
        with channel.changed:
            self._held, self._after = held, after
            channel.changed.notify_all()


@torch.no_grad()
def _put(changed: dict[str, Tensor], buffers: Sequence[Tensor]) -> None:
    """Copy changed buffers, by index, into `buffers`."""
    for place, value in changed.items():
        buffers[int(place)].copy_(value)


class ReplicatedElasticLoop(ElasticLoop):
    """One rank's loop through the generations of a run whose model each rank has.

    Args:
        training: with the plan that the run began with.
        config: of the run.
        membership: of this rank among those that change.
        is_late: whether this rank joins after the start.
        own_cost: the costs of this rank's node, if the plan does not know it.
        slowest_link: cost of the slowest connection of an initial rank to the master, for the admission of new nodes;
            None if all are admitted.
    """

    def __init__(
        self,
        training: Training,
        config: RunConfig,
        membership: ElasticGroup,
        is_late: bool,
        own_cost: NodeCost | None = None,
        slowest_link: LinkCost | None = None,
    ) -> None:
        super().__init__(training.group, training.plan, config, membership)
        self._training, self._is_late, self._slowest_link = training, is_late, slowest_link
        assert isinstance(training.model, ReplicatedModel)
        self._model = training.model
        self._loop: Loop = Loop(
            training, config, membership.fence, lambda: membership.is_followed, self._keep, lambda: not self._has_state
        )
        self._own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        self._before = [buffer.clone() for buffer in self._model.buffers()]
        costs = division_workers(training.plan, follows_speeds(config, training.plan))
        self._costs = dict(zip([a.node for a in training.plan.assignments], costs, strict=True))
        if own_cost is not None:
            self._costs[training.context.env.node.name] = own_cost
        self._kept_for = NO_STEP  # the step before which buffers were kept
        self._givers: list[Giver] = []
        self._taker: Taker | None = None  # while this rank has not the state yet

    def _begin_run(self) -> bool:
        if self._is_late:
            self._loop.last = NO_STEP
        else:
            self._start(self._loop)
        return not self._is_late

    def _before_step(self, step: int) -> None:
        """Save statistics: the forward pass changes them, and may have to be repeated."""
        if self._taker is not None and (self._taker.has_come or self._taker.is_full or self._has_samples(step)):
            self._catch_up()
        if self._before:
            torch._foreach_copy_(self._before, list(self._model.buffers()))
        self._kept_for = step

    def _after_step(self, loop: Loop) -> None:
        """Do nothing: all others have the whole model, too."""

    def _settle(self, loop: Loop) -> None:
        for giver in self._givers:
            giver.made(loop.last, self._model.buffers())
        self._end_givers()
        if not loop.is_plain(loop.last):
            self._catch_up()
        super()._settle(loop)

    def _train(self, loop: Loop, training: Training) -> bool:
        is_over = super()._train(loop, training)
        self._catch_up()
        if loop.monitor.catching_up:
            training.group.barrier()  # the givers stay until then
        for giver in self._givers:
            giver.end()
        return is_over

    def _enter(self) -> tuple[Loop, Training]:
        generation = self._membership.enter()
        self._givers = []
        if self._taker is not None:  # the transfer failed
            self._taker, self._loop.last = None, NO_STEP
        group = self._training.group
        standing = RankProgress(step=self._loop.last, is_settled=self._is_settled)
        rows = group.all_gather_bytes(msgspec.json.encode(standing))
        point = choose_resume_point([decode_json(row, RankProgress) for row in rows])
        self._divide(generation, point)
        self._take_over(point)
        if group.is_leader:
            present = {node: self._costs[node] for node in generation.nodes}
            publish_costs(self._training.context.env.store, present, self._slowest_link)
        self._tell(self._membership.what_began(), self._loop, self._training)
        return self._loop, self._training

    def _divide(self, generation: Generation, point: ResumePoint) -> None:
        """Divide samples among the ranks of `generation`, by the costs that a rank with the state knows."""
        before, monitor, group = self._training, self._loop.monitor, self._training.group
        if monitor.balance is not None:
            known = zip(before.plan.assignments, monitor.balance.costs, strict=True)
            self._costs |= {a.node: worker for rank, (a, worker) in enumerate(known) if rank not in monitor.catching_up}
        rows = group.all_gather_bytes(msgspec.json.encode(self._costs))
        costs_by_rank = [decode_json(row, dict[str, NodeCost]) for row in rows]
        self._costs = costs_by_rank[point.source]
        for node, costs in zip(generation.nodes, costs_by_rank, strict=True):
            self._costs.setdefault(node, costs[node])  # only a new node knows its own costs
        self._add_nodes()
        workers = tuple(self._costs[node] for node in generation.nodes)
        plan = plan_of(self._plan, generation.nodes, workers)
        catching_up = self._catching_up(workers, point.new)
        present = _without(workers, catching_up)
        shares = apportion(plan.micro_batch_size, present)
        division = Division(present)
        is_balanced = follows_speeds(self._config, plan) and group.size > 1
        self._model.regroup(self._own)
        self._training = replace(
            before,
            plan=plan,
            sampler=make_sampler(before.context, plan, group.rank, division),
            division=division,
            balance=Balance(costs=present, shares=shares) if is_balanced else None,
        )
        self._loop.regroup(self._training, [a.node for a in self._plan.assignments], catching_up)

    def _catching_up(self, workers: Sequence[NodeCost], new: Sequence[int]) -> dict[int, NodeCost]:
        """Return the `new` ranks that get the state in the background, with their costs."""
        others = sum(worker.capacity for rank, worker in enumerate(workers) if rank not in new)
        if others < self._plan.micro_batch_size or self._training.context.arithmetic.scaler.is_enabled():
            return {}  # the others do not hold all samples, or gradients alone do not tell what a step does
        return {rank: workers[rank] for rank in new}

    def _add_nodes(self) -> None:
        """Add nodes that joined to the plan of the whole run; the leader announces a changed plan."""
        plan = with_nodes(self._plan, came(self._plan, self._costs))
        if plan is not self._plan:
            self._plan = plan
            if self._training.group.is_leader:
                self._training.context.env.notify(plan)

    def _take_over(self, point: ResumePoint) -> None:
        """Reach the agreed step, or start the transfer of its state."""
        rank, loop = self._training.group.rank, self._loop
        if rank not in [taker for _, taker in point.transfers]:
            if self._kept_for == loop.last + 1:
                for buffer, before in zip(self._model.buffers(), self._before, strict=True):
                    buffer.copy_(before)
            add_untold(loop.monitor.history, self._training.sampler, self._first, loop.last)
            self._settled = loop.last if point.is_settled else NO_STEP
        for giver, taker in point.transfers:
            if rank == giver:
                self._give(taker)
            elif rank == taker:
                self._take(giver, point)

    def _give(self, taker: int) -> None:
        """Give the state to rank `taker`: the history now, the rest in the background."""
        group, loop = self._training.group, self._loop
        assert group.mesh is not None
        loop.monitor.history.wall_seconds = time.perf_counter() - self._begin
        group.mesh.send_to(taker, msgspec.msgpack.encode(loop.monitor.history))
        held = HeldState.of(self._training, loop.state(loop.last), History())
        self._givers.append(Giver(self._membership, group.rank, taker, held, self._model.buffers()))

    def _take(self, giver: int, point: ResumePoint) -> None:
        """Load the state of rank `giver`: in the background if this rank is one of `catching_up`, else now."""
        group, loop = self._training.group, self._loop
        assert group.mesh is not None
        history = decode_msgpack(group.mesh.receive_from(giver), History)
        taker = Taker(self._membership, giver, group.rank, self._training)
        if group.rank in loop.monitor.catching_up:
            self._taker = taker
        else:
            taker.catch_up(loop.finish_step)
        loop.monitor.history = history
        self._mark = time.perf_counter()  # the other ranks know the time lost before
        self._begin = self._mark - history.wall_seconds
        loop.last, self._kept_for = point.step, NO_STEP
        self._settled = loop.last if point.is_settled else NO_STEP

    @property
    def _has_state(self) -> bool:
        return self._taker is None

    def _has_samples(self, step: int) -> bool:
        return any(len(part.indices) for part in self._training.sampler.step(step))

    def _keep(self, step: int) -> bool:
        """Save the gradients of `step` if this rank has no state yet; return whether it has none."""
        if self._taker is not None:
            self._taker.keep(step)
        return self._taker is not None

    def _catch_up(self) -> None:
        """Load the state, if this rank does not have it."""
        if self._taker is not None:
            last = self._loop.last
            self._taker.catch_up(self._loop.finish_step)
            self._taker, self._loop.last = None, last
            self._membership.has_state()

    def _end_givers(self) -> None:
        """End transfers to ranks that have caught up."""
        for giver in self._givers:
            if giver.taker not in self._loop.monitor.catching_up:
                giver.end()
        self._givers = [giver for giver in self._givers if giver.taker in self._loop.monitor.catching_up]


def _without(workers: Sequence[NodeCost], catching_up: Mapping[int, NodeCost]) -> tuple[NodeCost, ...]:
    """Return `workers` with no samples for the ranks `catching_up`."""
    return tuple(
        replace(one, max_units=0, min_units=0) if rank in catching_up else one for rank, one in enumerate(workers)
    )


def plan_of(plan: Plan, nodes: Sequence[str], workers: Sequence[NodeCost]) -> Plan:
    """Return `plan` with only `nodes`, in their order, and samples divided by the costs in `workers`."""
    assignments = {assignment.node: assignment for assignment in plan.assignments}
    shares = apportion(plan.micro_batch_size, workers)
    return msgspec.structs.replace(
        plan,
        assignments=tuple(
            msgspec.structs.replace(assignments[node], rank=rank, samples=samples)
            for rank, (node, samples) in enumerate(zip(nodes, shares, strict=True))
        ),
    )
