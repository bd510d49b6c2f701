"""Continuation of a training of Ultralytics from the same batch when ranks are lost, and when they join.

Ultralytics' loop cannot be left in the middle of an epoch, and it is not: what ranks do together is done inside calls
that the loop makes, and is done again there. There are two kinds of it:

    batches           their gradients are complete, on all ranks, where a step follows and where an epoch ends
    other things      a validation, the last one of the best weights, the figures of the record

No rank ends such a thing before all have begun it, so ranks are never further apart than one of them. When a rank is
lost, in the next generation:

    some have complete gradients that others lack     those others take over the state that followed from them
    some have what another thing came to              those others are told it
    gradients are not complete yet                    all do the batches again that these are to be of, with new shares

A rank that has joined takes over the state, too, and goes through the current epoch without computing finished batches.

The state decides the batches that come, and holds the history: any rank that goes on may have to write the record. It
is sent without pickle:

    length of the head (8 bytes) | head: numbers and text | tensors
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from safetensors.torch import load, save
from torch import Tensor

from evener.comm.group import Group
from evener.data.sampler import Sampler
from evener.frontends.yolo.image_shares import ImageShares
from evener.launch.rank_environment import RankEnvironment
from evener.membership.elastic_group import ElasticGroup
from evener.membership.resume_point import RankProgress, choose_resume_point
from evener.oracle.apportion import NodeCost
from evener.records.decoding import decode_msgpack
from evener.records.errors import NodeLost
from evener.records.history import History
from evener.records.record import Event
from evener.records.schema import Amount, Part, Whole
from evener.training.checkpoint import apart
from evener.training.elastic.loop import NO_STEP
from evener.training.elastic.loss_events import add_untold, tell_generation
from evener.training.elastic.state_transfer import send_large, take_large

_LENGTH = struct.Struct("<Q")
_MODEL, _AVERAGE, _OPTIMIZER, _SUMMED = "model.", "average.", "optimizer.", "summed."
Number = float | int | bool | None


class TrainerState(Part, frozen=True, kw_only=True):
    """The state of a training apart from its tensors.

    Attributes:
        batch: the last one, from 1, that the weights and the gradients that wait for a step contain.
        epoch: in which the loop is, from 0; `first_epoch` is the one with which the run began.
        stepped: batch, from 0, after which the optimiser stepped last; -1: none.
        updates: of the averaged weights.
        rounds: how often the loss was told that an epoch is over.
        best_fitness: of all validations so far.
        stopper: what decides an early stop, by name.
        recoveries: from losses that were no numbers, in a row.
        metrics: of the last validation; `fitness` is theirs.
        losses: the parts of the last batch's loss; `mean_losses` those of the epoch so far.
        numbers: entries of the optimiser's state that are not tensors, by `<weight>.<name>`.
        scaler: state of the scaler of losses in half precision, by name; empty where it is off.
        momenta: momentum of every group of the optimiser, which rises while it warms up; None where it has none.
        history: of the run.
    """

    batch: Amount
    epoch: Amount
    first_epoch: Amount
    stepped: Whole
    updates: Amount
    rounds: Amount
    best_fitness: float | None
    stopper: dict[str, Number]
    recoveries: Amount
    metrics: dict[str, float]
    fitness: float | None
    losses: dict[str, float]
    mean_losses: dict[str, float] | None
    numbers: dict[str, Number]
    history: History
    scaler: dict[str, Number] = {}
    momenta: list[Number] = []


def encode_state(trainer: Any, batch: int, first_epoch: int, history: History) -> bytes:
    """The state of `trainer`, whose weights contain `batch`."""
    model, average, gradients = trainer.model.module, trainer.ema, trainer.model.gradients
    optimizer, numbers = _optimizer_state(trainer.optimizer)
    scale = trainer.scaler.get_scale()
    head = TrainerState(
        batch=batch,
        epoch=trainer.epoch,
        first_epoch=first_epoch,
        stepped=gradients.last,
        updates=average.updates,
        rounds=getattr(model.criterion, "updates", 0),
        best_fitness=trainer.best_fitness,
        stopper=vars(trainer.stopper),
        recoveries=trainer.nan_recovery_attempts,
        metrics=trainer.metrics or {},
        fitness=trainer.fitness,
        losses=_floats(trainer.model.told[1]) or {},
        mean_losses=_floats(trainer.tloss),
        numbers=numbers,
        history=history,
        scaler=trainer.scaler.state_dict(),
        momenta=[group.get("momentum") for group in trainer.optimizer.param_groups],
    )
    tensors = {
        **_named(_MODEL, model.state_dict()),
        **_named(_AVERAGE, average.ema.state_dict()),
        **_named(_OPTIMIZER, optimizer),
        **_named(_SUMMED, {str(i): grad / scale for i, grad in enumerate(gradients.summed) if grad is not None}),
    }
    encoded = msgspec.msgpack.encode(head, enc_hook=float)
    return b"".join((_LENGTH.pack(len(encoded)), encoded, save(apart(tensors))))


@torch.no_grad()
def restore_state(trainer: Any, data: bytes | bytearray) -> TrainerState:
    """Bring `trainer` to the state that `encode_state` made `data` of; return the rest of the state."""
    (length,) = _LENGTH.unpack(data[: _LENGTH.size])
    head = decode_msgpack(data[_LENGTH.size : _LENGTH.size + length], TrainerState)
    tensors = load(bytes(data[_LENGTH.size + length :]))
    model, average, gradients = trainer.model.module, trainer.ema, trainer.model.gradients
    model.load_state_dict(_of(_MODEL, tensors))
    average.ema.load_state_dict(_of(_AVERAGE, tensors))
    average.updates = head.updates
    _restore_optimizer(trainer.optimizer, _of(_OPTIMIZER, tensors), head.numbers)
    for group, momentum in zip(trainer.optimizer.param_groups, head.momenta, strict=False):
        group.update({} if momentum is None else {"momentum": momentum})
    if head.scaler and trainer.scaler.is_enabled():
        trainer.scaler.load_state_dict(head.scaler)
    summed, scale = _of(_SUMMED, tensors), trainer.scaler.get_scale()
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients.summed = (
        [_scaled(summed.get(str(i)), scale, weight) for i, weight in enumerate(weights)] if summed else []
    )
    gradients.last = head.stepped
    trainer.best_fitness, trainer.fitness, trainer.metrics = head.best_fitness, head.fitness, dict(head.metrics)
    trainer.nan_recovery_attempts = head.recoveries
    vars(trainer.stopper).update(head.stopper)
    if hasattr(model.criterion, "update") and head.rounds:
        model.criterion.updates = head.rounds - 1
        model.criterion.update()
    return head


def _scaled(grad: Tensor | None, scale: float, weight: Tensor) -> Tensor | None:
    return None if grad is None else grad.to(weight.device) * scale


def take_state(trainer: Any, data: bytes | bytearray, device: torch.device, *, is_new: bool) -> TrainerState:
    """Bring `trainer` to a state, as if it had computed its batches; return the rest of the state.

    Args:
        trainer: of Ultralytics, which has its model.
        data: that `encode_state` made.
        device: of the losses.
        is_new: whether its loop goes through the epoch of the state from the beginning, without computing.
    """
    state = restore_state(trainer, data)
    model = trainer.model
    model.gradients.forget()
    model.done = state.batch
    losses = state.mean_losses or state.losses if is_new else state.losses
    parts = {name: torch.tensor(value, device=device) for name, value in losses.items()}
    model.told = torch.stack([*parts.values()] or [torch.zeros(())]), parts
    return state


def _floats(losses: Mapping[str, Tensor] | None) -> dict[str, float] | None:
    return None if losses is None else {name: float(value) for name, value in losses.items()}


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def _of(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Number]]:
    """Its tensors and its numbers, by `<weight>.<name>`."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Number] = {}
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value
            else:
                numbers[f"{index}.{name}"] = value
    return tensors, numbers


def _restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], numbers: Mapping[str, Number]
) -> None:
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**numbers, **tensors}.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


_MOST = 1000
"""Other things that follow each other without a batch between them, at most."""


class Position(Part, frozen=True, kw_only=True):
    """Where a rank is.

    Attributes:
        completed: how often gradients were complete since the run began; -1: it has no state yet.
        others: things of the other kind that it has ended since then.
        outcome: of the last of them.
        batch: the last one that complete gradients contain.
        computed: the last one that was computed.
        reported: the last one that was told of.
        costs: what images cost every node, as far as it knows.
    """

    completed: Whole
    others: Amount
    outcome: bytes
    batch: Amount
    computed: Amount
    reported: Amount
    costs: dict[str, NodeCost]


class Generations:
    """The generations of a training, as one rank passes through them.

    Args:
        env: of the rank.
        group: that is this rank's in every generation.
        work: which images each rank computes.
        trainer: of Ultralytics, whose model is made after this.
        is_late: whether the run has begun without this rank.

    Attributes:
        trainer: see above.
        batch: the last one, from 1, that complete gradients contain.
        reported: the last one that any rank reported.
        is_over: whether nothing is left to be trained.
    """

    def __init__(self, env: RankEnvironment, group: Group, work: ImageShares, trainer: Any, *, is_late: bool) -> None:
        assert env.control is not None
        self._group, self._work, self.trainer = group, work, trainer
        self._membership = ElasticGroup(env.control, group, env.address, env.stop_heartbeat)
        self._initial_nodes = () if is_late else tuple(group.nodes)
        self._completed = NO_STEP if is_late else 0
        self._others, self._outcome = 0, b""
        self.batch = self.reported = 0
        self.is_over = False
        self._first_epoch = 0
        self._mark = time.perf_counter()

    def begin(self, state: bytes) -> None:
        """Be a rank of the first generation, or of one that takes this rank in; the trainer is set up.

        Args:
            state: of the checkpoint to go on from; empty for none.
        """
        self._first_epoch = self.trainer.start_epoch
        self.batch = self.reported = self.trainer.model.done
        if state:
            self._go_on_from(state)
        self._membership.start(self._initial_nodes)
        self.admit()

    @property
    def is_followed(self) -> bool:
        """Whether this rank knows that others are to take part."""
        return self._membership.is_followed

    def at_batch(self, number: int) -> None:
        """Batch `number`, from 1, is computed now."""
        self._membership.at_step(number)

    def fence(self) -> None:
        """Return when this rank was certainly not given up; before it changes weights."""
        self._membership.fence()

    @property
    def ends_epoch(self) -> bool:
        """Whether `batch` is the last one of its epoch."""
        return bool(self.batch % len(self.trainer.train_loader) == 0)

    def state(self) -> bytes:
        """Encode the state of the trainer after `batch` for another rank."""
        return encode_state(self.trainer, self.batch, self._first_epoch, self._work.session.history)

    def completed(self, batch: int) -> None:
        """Gradients of all batches up to `batch` are complete."""
        self._completed += 1
        self._others, self._outcome = 0, b""
        self.batch, self._mark = batch, time.perf_counter()

    def restarts(self, batch: int) -> None:
        """The loop does an epoch again, after so many batches."""
        self.batch = self.reported = batch

    def ended(self, outcome: bytes) -> None:
        """Something that is no batch has come to this `outcome`."""
        self._others, self._outcome = self._others + 1, outcome

    def go_on(self, error: Exception) -> bytes | None:
        """Be in the next generation, if `error` came of ranks that are gone; else raise it.

        Returns:
            What the thing that was done has come to on others; None if it is to be done again.
        """
        self._membership.require_broken(error)
        return self.admit()

    def admit(self) -> bytes | None:
        """Enter the next generation with the ranks that have joined."""
        while True:
            try:
                return self._enter()
            except (RuntimeError, NodeLost) as error:
                self._membership.require_broken(error)

    def _enter(self) -> bytes | None:
        costs = self._work.costs()
        generation = self._membership.enter()
        position = self._position(costs)
        rows = [decode_msgpack(row, Position) for row in self._group.all_gather_bytes(msgspec.msgpack.encode(position))]
        point = choose_resume_point([RankProgress(step=_place(row)) for row in rows])
        best = rows[point.source]
        new = {node: row.costs[node] for node, row in zip(generation.nodes, rows, strict=True)}
        self._work.divide_among(generation.nodes, {**new, **best.costs})
        if position.completed == best.completed:
            self.trainer.model.take_back(self.batch)
        for giver, taker in point.transfers:
            if rows[taker].completed < best.completed:
                self._hand_over(giver, taker)
        self.trainer.train_loader.reset()
        self._tell(max(row.reported for row in rows), max(row.computed for row in rows) - best.batch)
        return best.outcome if position.completed == best.completed and position.others < best.others else None

    def _position(self, costs: dict[str, NodeCost]) -> Position:
        return Position(
            completed=self._completed,
            others=self._others,
            outcome=self._outcome,
            batch=self.batch,
            computed=self.trainer.model.done,
            reported=self.reported,
            costs=costs,
        )

    def _hand_over(self, giver: int, taker: int) -> None:
        """Let rank `taker` have the state of rank `giver`, if this is one of them."""
        rank, mesh = self._group.rank, self._group.mesh
        assert mesh is not None
        if rank == giver:
            place = msgspec.msgpack.encode((self._completed, self._others, self._outcome, self.is_over))
            mesh.send_to(taker, place)
            send_large(self.state(), mesh, taker)
        elif rank == taker:
            place = mesh.receive_from(giver)
            self._take(place, take_large(mesh, giver))

    def _take(self, place: bytes, data: bytearray) -> None:
        """Be where the giver is."""
        is_new = self._completed == NO_STEP
        head = decode_msgpack(place, tuple[int, int, bytes, bool])
        if head[3]:
            raise NodeLost("this node came when all was trained")
        self._completed, self._others, self._outcome, _ = head
        self._restore(data, is_new=is_new)
        if is_new:
            self._mark = time.perf_counter()  # what was lost before, those know who have been there

    def _restore(self, data: bytes | bytearray, *, is_new: bool) -> None:
        """Bring the trainer to a state; the loop of one that `is_new` begins with the epoch of it."""
        state = take_state(self.trainer, data, self._group.device, is_new=is_new)
        self.batch = state.batch
        self._work.session.monitor.history = state.history
        if is_new:
            self.trainer.start_epoch, self._first_epoch = state.epoch, state.first_epoch
            self.trainer.scheduler.last_epoch = state.epoch - 1

    def _go_on_from(self, data: bytes) -> None:
        """Begin with the state of a checkpoint."""
        self._restore(data, is_new=True)
        self.reported = self.batch
        message = f"resumed after step {self.batch} from the checkpoint that the master kept"
        self._work.session.monitor.emit(Event(step=self.batch, kind="resumed", message=message))

    def begins_epoch(self) -> None:
        """The loop has read with which epoch it is to begin; what it says of the first one is that of the run."""
        self.trainer.start_epoch = self._first_epoch

    def _tell(self, reported: int, repeated: int) -> None:
        """Have the record say what happened, and what it cost."""
        self.reported = reported
        membership, work = self._membership, self._work
        first = self._first_epoch * len(self.trainer.train_loader) + 1
        add_untold(work.session.history, self._sampler(), first, reported)
        count, repeated = len(work.nodes), max(0, repeated)
        began = membership.what_began()
        self._mark = tell_generation(
            began, membership, work.session.monitor, self._group, self._mark, count, self.batch, repeated
        )
        membership.has_told()
        membership.has_state()
        if self._group.is_leader:
            self.trainer.speak_for_all()

    def _sampler(self) -> Sampler:
        loader = self.trainer.train_loader
        return self._work.train_sampler(loader.dataset, loader.batch_size, self.trainer.args.seed)


def _place(row: Position) -> int:
    """By which ranks are compared: who is further is the one to go by."""
    return NO_STEP if row.completed == NO_STEP else row.completed * _MOST + row.others
