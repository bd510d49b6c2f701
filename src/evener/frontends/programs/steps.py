"""The steps of a program, counted by its batches: a step lasts from one training batch to the next.

A step also notices a loss that the program begins to compute in another way, as from some epoch on. The kind of a loss
is the set of operations at the end of its autograd graph, which takes some 25 microseconds to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer

from evener.benchmark.exchanges import may_have_owners, measure_sums
from evener.comm.group import Group
from evener.data.sampler import Division
from evener.frontends.programs.batch_parts import STAND_IN, BatchPart
from evener.frontends.programs.prepared import rate_of, sampled_weight
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.apportion import NodeCost, weights_to_workers
from evener.oracle.division.plan import Arrangement
from evener.oracle.rebalance import Balance
from evener.records.errors import InvalidInput
from evener.records.plan import Assignment, Check, Plan
from evener.records.record import Event, TrainRecord
from evener.training.saving import Saving
from evener.training.session import TrainingSession
from evener.training.step import StepResult

_NODES = 64
"""Largest number of operations of a graph that count, those next to the loss first."""
_KINDS = 32
"""Number of kinds after which no further one counts: such a program chooses its operations by its data."""
_ENTRANCES = ("backward", "grad")
"""Functions of `torch.autograd` that differentiate; `Tensor.backward` calls the first one."""


class LossGraphs:
    """The kinds of losses that this process has differentiated."""

    def __init__(self) -> None:
        self._kinds: set[frozenset[str]] = set()
        self._has_new = False
        self._original: dict[str, Callable[..., Any]] = {}

    def begin(self) -> None:
        """Look at all losses from now on."""
        if not self._original:
            for name in _ENTRANCES:
                self._original[name] = getattr(torch.autograd, name)
                setattr(torch.autograd, name, self._watched(self._original[name]))

    def end(self) -> None:
        """Stop looking."""
        for name, original in self._original.items():
            setattr(torch.autograd, name, original)
        self._original.clear()

    def take_new(self) -> bool:
        """Return whether there was a loss of a new kind since the last call."""
        has_new, self._has_new = self._has_new, False
        return has_new

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def watched(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if len(self._kinds) < _KINDS:
                self._add(kind_of([tensors] if isinstance(tensors, Tensor) else tensors))
            return original(tensors, *args, **kwargs)

        return watched

    def _add(self, kind: frozenset[str]) -> None:
        self._has_new |= kind not in self._kinds
        self._kinds.add(kind)


def kind_of(losses: Iterable[Any]) -> frozenset[str]:
    """Return the names of the operations next to `losses`, with what they do to a batch (a mean or a sum)."""
    nodes: list[Any] = [loss.grad_fn for loss in losses if isinstance(loss, Tensor) and loss.grad_fn is not None]
    known, names = set(nodes), set[str]()
    for node in nodes:  # which grows
        names.add(f"{node.name()} {getattr(node, '_saved_reduction', '')}")
        if len(nodes) < _NODES:
            following = {one: None for one, _ in node.next_functions if one is not None and one not in known}
            known.update(following)
            nodes += following
    return frozenset(names)


_WARM_UP = 2
_KNOWN_STEPS = 2
"""First steps, which are compared with one process before the first one."""
_GPU_PROBE_STEPS = 100
"""Steps between two reads of a weight on a GPU, which synchronise."""


class Steps:
    """Counts, times and reports the steps of this rank, and holds the division of batches.

    Args:
        env: of this rank.
        group: the ranks.
        shares: relative shares of the ranks; None to measure them.
        layers: division of layers; None if batches are divided.

    Attributes:
        number: of steps that have begun.
        epoch: from 0.
        optimizers: of the program.
        loss_graphs: of the program.
        saving: writer of checkpoints, which also ends a run that was asked to stop; None without checkpoints.
    """

    def __init__(
        self, env: RankEnvironment, group: Group, shares: Sequence[float] | None, layers: Arrangement | None = None
    ) -> None:
        self._env, self._group, self._shares, self._layers = env, group, shares, layers
        self.number = self.epoch = 0
        equal = tuple(NodeCost(unit_seconds=1.0, min_units=STAND_IN) for _ in env.nodes)
        workers = equal if shares is None else tuple(weights_to_workers(shares, [None] * group.size))
        self.division = Division(workers)
        self._session: TrainingSession | None = None
        self._owner: object = None
        self._part: BatchPart | None = None
        self._loss: Tensor | float | None = None
        self.optimizers: list[Optimizer] = []
        self._notes: list[Event] = []
        self.loss_graphs = LossGraphs()
        self.saving: Saving | None = None

    @property
    def seconds(self) -> float:
        """The duration of all steps so far."""
        return self._session.seconds if self._session else 0.0

    def follow(self, optimizer: Optimizer) -> None:
        """Check that `optimizer` does the same on all ranks."""
        self.optimizers.append(optimizer)

    def tell(self, notes: Sequence[Event]) -> None:
        """Keep and show `notes`, as soon as there is a step."""
        self._notes += notes
        while self._session is not None and self._notes:
            self._session.monitor.emit(self._notes.pop(0))

    def sizes(self, count: int, is_training: bool) -> Sequence[int]:
        """Samples for every rank of a batch of `count`; of one that is evaluated, at least one."""
        size = self._group.size
        if is_training or count < size:
            return self.division.sizes(self.number + 1, count)
        return [n + 1 for n in self.division.parts(self.number + 1, count - size)]

    def begin(self, owner: object, part: BatchPart, check: Check | None) -> None:
        """Begin a step on `part`, loaded by `owner`, unless one is under way."""
        if self._part is not None:
            return
        session = self._session or self._start(part.total, check, self._measure_lines())
        self.number += 1
        session.begin_step(self.number)
        self._group.timer.pace.expect(part.loaded)
        self._owner, self._part, self._loss = owner, part, None

    def resume_complete(self, batch_size: int) -> None:
        """Begin a run whose steps are all in its checkpoint, so that it has a record."""
        self._start(batch_size, None, {})

    def tell_loss(self, loss: Tensor | float) -> None:
        """Set this rank's part of the mean loss of the step; only the first one counts."""
        if self._loss is None:
            self._loss = loss

    def save_if_due(self) -> None:
        """End the step, and write a checkpoint if it is time.

        Raises:
            Interrupted: a rank was asked to stop; a checkpoint is written.
        """
        if self._session is not None and self.saving is not None:
            self._group.timer.pause()
            self.end(self._owner)
            self._session.save_if_due(self.number)

    def save(self) -> None:
        """Write a checkpoint after this step. Raises Interrupted if a rank was asked to stop."""
        if self._session is not None and self.saving is not None:
            self._session.monitor.settle()
            self._session.stop_if_asked(self.number)
            self._session.save(self.number)

    def end(self, owner: object) -> None:
        """End the step that `owner`'s last batch began.

        Raises:
            Interrupted: a rank was asked to stop.
        """
        if self._part is None:  # work between two steps, such as an evaluation, is part of none
            self._group.timer.discard()
            self.restart_clock()
        if self._part is None or owner is not self._owner:
            return
        part, self._part = self._part, None
        assert self._session is not None
        self._session.end_step(
            self.number,
            StepResult(
                epoch=self.epoch,
                samples=part.samples,
                total=part.total,
                loss=self._loss,
                rate=sum(rate_of(one) for one in self.optimizers),
                weight=self._probe(),
                has_new_loss=self.loss_graphs.take_new() and self.number > _KNOWN_STEPS,
            ),
        )
        if self.saving is None:  # else where it saves
            self._session.stop_if_asked(self.number)

    def end_any(self) -> None:
        """End the current step, whichever loader began it. Raises Interrupted, as `end`."""
        self.end(self._owner)

    def take_new_loss(self) -> bool:
        """Return whether any rank has computed its loss in another way since the last call; alike on all ranks."""
        if self._session is None:
            return False
        monitor = self._session.monitor
        has_new, monitor.has_new_loss = monitor.has_new_loss, False
        return has_new

    def restart_clock(self) -> None:
        """Let the next step begin now."""
        if self._session is not None:
            self._session.monitor.restart_clock()

    def validated(self, **fields: Any) -> None:
        """Record a validation after the last step, with these `fields`. Raises NonFiniteLoss."""
        assert self._session is not None
        self._session.monitor.settle()
        self._session.validated(step=self.number, epoch=self.epoch, **fields)

    def last_loss(self) -> float | None:
        """Return the mean loss over the samples of this epoch; None if the program reported none."""
        assert self._session is not None
        self._session.monitor.settle()
        return self._session.history.last_loss()

    def is_over(self) -> bool:
        """Whether a callback ends the run with this epoch; every rank calls this."""
        assert self._session is not None
        self._session.monitor.settle()
        return self._session.monitor.is_over(self.number, self.epoch)

    def finish(self, startup_from: float, **fields: Any) -> TrainRecord | None:
        """Return the record after the last step; None without a step.

        Args:
            startup_from: time at which the run began.
            fields: of the record, which override its own.
        """
        if self._session is None:
            return None
        self.end(self._owner)
        self._session.monitor.settle()
        known: dict[str, Any] = {"seed": 0, "epochs": self.epoch + 1, "precision": "as the program says"}
        return self._session.record(startup_from, **(known | fields))

    def _probe(self) -> float:
        if not self.optimizers or (self._group.has_accelerators and self.number % _GPU_PROBE_STEPS):
            return 0.0
        return sampled_weight(self.optimizers[self.number % len(self.optimizers)], self.number)

    def _measure_lines(self) -> Mapping[str, float]:
        """Return the rates of the lines by which gradients are summed; empty if in a ring. All ranks call this."""
        if self._layers is not None:
            return {}
        parameters = {p for one in self.optimizers for group in one.param_groups for p in group["params"]}
        gradient_bytes = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
        hosts = [node.host for node in self._env.nodes]
        if not may_have_owners(self._group, gradient_bytes, hosts):
            return {}
        return measure_sums(self._group, gradient_bytes, hosts).line_rates

    def _start(self, total: int, check: Check | None, line_rates: Mapping[str, float]) -> TrainingSession:
        first = self.number + 1
        sizes, workers = self.division.sizes(first, total), self.division.costs(first)
        follows = self._shares is None and self._layers is None
        balance = Balance(costs=workers, shares=tuple(sizes), is_learning=True) if follows else None
        plan = msgspec.structs.replace(self._plan_of(total, sizes, check), line_rates=dict(line_rates))
        self._session = TrainingSession(
            self._env,
            self._group,
            plan,
            division=self.division,
            balance=balance if self._group.size > 1 else None,
            warm_up=_WARM_UP,
            saving=self.saving,
        )
        if self._group.is_leader:
            self._env.notify(plan)
        self.tell(())
        self._session.start(first)
        return self._session

    def _plan_of(self, total: int, sizes: Sequence[int], check: Check | None) -> Plan:
        if self._layers is not None:
            return _plan_of_layers(self._env, self._layers, total, check)
        why = (
            "equal at first: shares follow what the first steps take" if self._shares is None else "share as requested"
        )
        assignments = tuple(
            Assignment(rank=rank, node=node.name, device=node.device, samples=samples, reason=why)
            for rank, (node, samples) in enumerate(zip(self._env.nodes, sizes, strict=True))
        )
        strategy: Any = "data" if self._group.size > 1 else "serial"
        return Plan(strategy=strategy, batch_size=total, assignments=assignments, check=check)


def _plan_of_layers(env: RankEnvironment, layers: Arrangement, total: int, check: Check | None) -> Plan:
    """Return the plan of ranks that divide layers, each with all samples."""
    (replica,) = layers.replicas
    assignments = tuple(
        Assignment(
            rank=rank,
            node=node.name,
            device=node.device,
            samples=total,
            reason="its part of every layer",
            replica=0,
            share=share / sum(replica.shares),
        )
        for rank, (node, share) in enumerate(zip(env.nodes, replica.shares, strict=True))
    )
    return Plan(strategy=layers.division, batch_size=total, assignments=assignments, check=check)


def refuse_outside(is_open: bool, has_loaders: bool, what: str) -> None:
    """Raise InvalidInput where a value belongs to no batch, though batches are divided."""
    if has_loaders and not is_open:
        raise InvalidInput(
            f"{what} is of the batch that is computed now, and there is none: take it inside the loop over the loader, "
            "or add up sums and numbers of samples, and divide run.sum of them"
        )
