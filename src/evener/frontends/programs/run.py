"""A user's program on several nodes, in five changed lines; a single process behaves as before.

run = evener.join()
model, optimizer, loader = run.prepare(model, optimizer, loader)
for epoch in run.epochs(10):
    for x, y in loader:                     # this node's part of the batch
        loss = loss_of(model(x), y)         # the mean over its samples, as it was
        optimizer.zero_grad()
        loss.backward()                     # gradients are now those of the whole batch, on all nodes
        optimizer.step()
        print(run.mean(loss))
if run.leader:
    torch.save(run.state(model), "model.pt")
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from evener.comm import message_topics
from evener.comm.group import Group
from evener.data.alike import require_alike
from evener.data.fingerprint import print_of
from evener.data.loader import seed_all
from evener.frontends.programs.alike_draws import AlikeDraws
from evener.frontends.programs.batch_lookup import HandedBatch
from evener.frontends.programs.batch_parts import BatchPart, Count, OpenParts, cut_rows, require_count, rows_of
from evener.frontends.programs.batch_tracking import BatchFollowing
from evener.frontends.programs.divided_loader import DividedLoader, require_same_size
from evener.frontends.programs.equivalence_check import EquivalenceCheck
from evener.frontends.programs.options import ScriptConfig
from evener.frontends.programs.prepared import PreparedOptimizer, move_state
from evener.frontends.programs.random_state import take_leaders_state
from evener.frontends.programs.steps import Steps, refuse_outside
from evener.frontends.programs.totals import mean_like, numbers_of, total_of
from evener.frontends.programs.undivided_gradients import UndividedGradients
from evener.frontends.programs.unprepared_tensors import UnpreparedWeights
from evener.frontends.programs.work_division import (
    BatchDivision,
    LayerDivision,
    Prepared,
    WorkDivision,
    added_weights,
    prepare_added,
    refuse_added,
)
from evener.launch.nodes import relative_shares
from evener.launch.rank_environment import RankEnvironment
from evener.records.errors import InvalidInput, require
from evener.records.record import Event, TrainRecord
from evener.system import accelerators

_NOTHING_PREPARED = (
    "nothing was prepared, so every node would run the whole program for itself: after evener.join(), write "
    "model, optimizer, loader = run.prepare(model, optimizer, loader)"
)
_NO_LOADER = (
    "run.prepare was given no loader, so every node computes every batch, which is no faster than one node: write "
    "model, optimizer, loader = run.prepare(model, optimizer, loader), or take batches through run.share"
)
_LOADER_NOT_TAKEN = (
    "the program goes through another loader than the one that run.prepare returned, so every node computes every "
    "batch: write model, optimizer, loader = run.prepare(model, optimizer, loader), and loop over that loader"
)


class Run:
    """A run of a user's program, of which this process is one node.

    Programs and front ends call the methods up to `finish`. The loaders and optimizers of `prepare` call the others.

    Attributes:
        device: of this node.
        leader: whether this node prints and writes files for all.
        rank: of this node, from 0.
        size: number of nodes.
        part: of the current or last batch.
        steps: of the program.
    """

    def __init__(self, env: RankEnvironment, group: Group, config: ScriptConfig | None) -> None:
        self._env, self.group, self._config = env, group, config
        self._is_alone = config is None  # started without Evener: the program behaves as before
        self.device, self.leader, self.rank, self.size = group.device, group.is_leader, group.rank, group.size
        shares = relative_shares(config.shares if config else "measured", group.size)
        layers = config.layers(group.size) if config else None
        self._parts = OpenParts()
        self._undivided = UndividedGradients(group, self._parts, env.patience)
        self._work: WorkDivision = BatchDivision(
            group, self._parts, env.patience, self._undivided, lambda: self.steps.number
        )
        if layers is not None:
            self._work = LayerDivision(group, layers, self._tell_undivided, self._parts)
        self.steps = Steps(env, group, shares, layers)
        self._models: list[Prepared] = []
        self._loaders: list[DividedLoader] = []
        self.part: BatchPart | None = None
        self._has_own_draws = self._sharing = self._has_exchanged = self._has_prepared = False
        self._has_updated = self._has_gathered = False
        self._epoch = self._compared_epoch = 0
        self._is_last_epoch = False
        self._norm_passes = 0
        self._thread, self._has_threads = threading.get_ident(), False
        self._current: HandedBatch | None = None
        self._is_stepped = False
        self._passes: set[object] = set()
        self._seen: Counter[object] = Counter()
        may_differ, strategy = bool(config and config.approximate), layers.division if layers else None
        self._unprepared = UnpreparedWeights(lambda: self.steps.optimizers)
        self._following = BatchFollowing(self._parts, self._use, lambda: self.group.size > 1)
        self.equivalence_check = EquivalenceCheck(
            env, group, shares, is_wanted=group.size > 1, may_differ=may_differ, layers=strategy
        )

    def prepare(self, *things: Any, count: Count = "samples") -> Any:
        """Prepare models, optimizers, loaders, schedulers and scalers for all nodes, which call this in the same order.

        Models and optimizers stay the same objects. A prepared loader yields this node's part of every batch, and its
        `batch_size` is that of a step over all nodes.

        Args:
            things: of the program.
            count: divisor of the mean loss: "samples", or a function of a batch that returns the number of tokens or
                the sum of class weights; "sum" for a loss without a divisor.

        Raises:
            InvalidInput: an object cannot be shared; the message gives advice.
        """
        require_count(count)
        self._has_prepared |= bool(things)
        made = things if self._is_alone else tuple(self._prepared(thing, count) for thing in things)
        self._move_states()
        return made[0] if len(made) == 1 else made

    def epochs(self, rounds: int | Iterable[Any]) -> Iterator[Any]:
        """Yield 0 to `rounds` - 1, or the items of `rounds`; synchronise the random numbers of all nodes at each.

        Raises:
            InvalidInput: nothing has been prepared on several nodes.
        """
        if self.size > 1 and not self._has_prepared:
            raise InvalidInput(_NOTHING_PREPARED)
        values = range(rounds) if isinstance(rounds, int) else rounds
        last = len(values) - 1 if isinstance(values, Sized) else None
        for index, value in enumerate(values):
            self.begin_epoch(index, is_last=index == last)
            yield value
            self._refuse_threads()

    def begin_epoch(self, index: int, *, is_last: bool = False) -> None:
        """Begin epoch `index`; every node calls this."""
        self.steps.epoch, self._is_last_epoch = index, is_last
        self._epoch = max(self._epoch, index)
        self._work.draw_own()
        if self.size > 1:
            take_leaders_state(self.group, message_topics.epoch(index))
            self._has_own_draws = False

    def seed_draws(self, *entropy: int) -> None:
        """Seed the random numbers of this node's samples, and those for the whole batch as in one process."""
        if self._work.alike_draws is None:
            seed_all(*entropy, stream=self.rank, device=self.device)
        else:
            self._work.alike_draws.seed(*entropy, rank=self.rank)

    def begin_evaluation(self) -> None:
        """Begin an evaluation between two epochs: sums in it are not of the training batches before."""
        self._parts.forget_training()

    def share(self, batch: Any, dim: int = 0, count: Count = "samples") -> Any:
        """Return this node's part of a batch that the program made without a loader, equal on all nodes.

        Args:
            batch: a tensor, or a nest of tensors with the samples in `dim`.
            dim: of the samples.
            count: divisor of the mean loss, as in `prepare`.

        Raises:
            InvalidInput: the nodes have different batches.
        """
        require_count(count)
        if self._is_alone:
            return batch
        self._sharing = True
        self.loading(self)
        small = self._small(self)
        if self._work.alike_draws is not None:
            take_leaders_state(self.group)
        if small is not None:
            batch = cut_rows(batch, BatchPart(first=0, samples=0, total=0, loaded=small), dim)
        require_alike(
            self.group, print_of(batch), "run.share divides a batch that is the same on all nodes: seed them alike"
        )
        part = self.part_of(rows_of(batch, dim), self.is_training())
        return self._compute(self, part, cut_rows(batch, part, dim), count)

    def mean(self, value: Any) -> Any:
        """Return the mean of every node's `value`, such as a loss, over the whole batch. Every node calls this.

        Raises:
            InvalidInput: there is no current batch, or an evaluation has just ended.
        """
        if self._is_alone:
            return value.detach() if isinstance(value, Tensor) else value
        if self._divides_batches:  # otherwise every node has the whole batch
            if self._loaders and not self._has_divided:
                raise InvalidInput(_LOADER_NOT_TAKEN)
            refuse_outside(self._parts.are_any, bool(self._loaders) or self._sharing, "run.mean")
            self._parts.require_clear("run.mean", is_training=self.is_training())
        weight, numbers = self._parts.weight() / self.group.size, numbers_of(value)
        numbers = numbers * weight if weight else np.zeros_like(numbers)
        if numbers.size == 1:
            self.steps.tell_loss(float(numbers.sum()))
        return mean_like(value, total_of(self.group, "mean", numbers, self._env.patience))

    def note_loss(self, loss: Tensor) -> None:
        """Record this node's loss of the batch; the record reads it from the device when it is a step old."""
        weight, wide = self._parts.weight() / self.group.size, accelerators.wide(loss.detach())
        self.steps.tell_loss(wide * weight if weight else torch.zeros_like(wide))

    def sum(self, value: Any) -> Any:
        """Return the sum of a number or a tensor over all nodes. Every node calls this.

        Stand-ins of a node without a sample of the current batch do not count. After an evaluation amid a batch, a sum
        in evaluation mode is of the evaluation.

        Raises:
            InvalidInput: it may be of the batch or of the evaluation, and a node has no sample of the batch; or a node
                added it up over several batches and has samples of some only.
        """
        if self._is_alone:
            return value
        self._has_exchanged = True
        self._parts.require_clear("run.sum", is_training=self.is_training())
        return self._work.sum(value)

    def ratio(self, numerator: Tensor, denominator: Any) -> Tensor:
        """Return a loss with its own divisor, such as a number of tokens; every node differentiates it.

        The loss of the batch is the sum of all numerators divided by the sum of all denominators.

        Args:
            numerator: the sum over this node's part of the batch, a scalar.
            denominator: of this node's part, zero or more.
        """
        divisor = float(denominator)
        require(divisor >= 0, "run.ratio: denominator", divisor, "zero or more")
        if not self._is_alone:
            divisor = divisor if self._parts.weight() else 0.0
            whole = float(total_of(self.group, "ratio", np.asarray(divisor), self._env.patience))
            self._parts.reweigh(self.group.size * divisor / whole if whole else 0.0)
        return numerator / (divisor or 1.0)

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all nodes, in the order of the batch; differentiable. Every node calls this."""
        self._has_exchanged = True
        self._has_gathered |= rows.requires_grad
        return rows if self._is_alone else self._work.gather(rows)

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the model's state dict, which plain PyTorch loads."""
        state = model.state_dict()
        return {name.removeprefix("_orig_mod."): tensor.detach() for name, tensor in state.items()}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients on this node inside, for all but the last batch of a step that accumulates several."""
        with ExitStack() as stack:
            for model in self._models:
                stack.enter_context(model.means.accumulating())
            yield

    def finish(self, **fields: Any) -> TrainRecord | None:
        """Return the record of the run; None if the program trained nothing. Every node calls this once.

        Args:
            fields: of the record, which override its own.

        Raises:
            InvalidInput: several nodes have run the whole program, each for itself.
        """
        assert self._config is not None
        if self.size > 1 and not self._has_prepared and not self._sharing and not self._has_exchanged:
            raise InvalidInput(_NOTHING_PREPARED)
        self.steps.tell(self.equivalence_check.collect())
        self._refuse_threads()
        self._undivided.drop_unused(self._averaged_weights())
        self._compare_undivided(list(self._averaged_weights()))
        self._following.end()
        self.steps.loss_graphs.end()
        if sentence := self._unprepared.end(self.group):
            self.steps.tell([Event(step=self.steps.number, kind="differs", message=sentence)])
        if self._work.alike_draws is not None:
            self._work.alike_draws.end()
        return self.steps.finish(self._config.started, **{"task": self._config.script.stem, **fields})

    def _prepared(self, thing: Any, count: Count) -> Any:
        if isinstance(thing, nn.Module):
            if self.size == 1:
                return thing.to(self.device)
            self._unprepared.begin()
            self._models.append(self._work.prepared(thing))
            self._following.add(self._models[-1].model)
            return self._models[-1].model
        if isinstance(thing, Optimizer):
            self.steps.follow(PreparedOptimizer(thing, self).optimizer)
            return thing
        if isinstance(thing, DataLoader):
            require_same_size(self.group, thing)
            self._loaders.append(DividedLoader(thing, self, count))
            return self._loaders[-1]
        if isinstance(thing, LRScheduler | torch.amp.GradScaler) or hasattr(thing, "step"):
            return thing
        raise InvalidInput(f"run.prepare takes models, optimisers and loaders, got {type(thing).__name__}")

    def _tell_undivided(self, sentence: str) -> None:
        self.steps.tell([Event(step=self.steps.number, kind="undivided", message=sentence)])

    # the interfaces `Divider` and `Updates`, for loaders and optimizers

    @property
    def draws_alike(self) -> bool:
        """Whether all ranks copy the random state of the first rank before every batch."""
        return self._work.draws_alike or self._work.alike_draws is not None

    @property
    def loads_alike(self) -> bool:
        """Whether all ranks load the same samples."""
        return self._work.draws_alike

    def part_of(self, count: int, is_training: bool) -> BatchPart:
        """Return this rank's part of a batch of `count` samples."""
        replica = self.equivalence_check.replica
        sizes = partial(self.steps.sizes, is_training=is_training) if replica is None else replica.sizes
        return self._work.part(count, sizes)

    def is_training(self) -> bool:
        """Whether the program may call `backward()` and a model is in training mode."""
        training = [model.model.training for model in self._models]
        return torch.is_grad_enabled() and (any(training) or not training)

    def begin(self, loader: DividedLoader) -> int | None:
        """Begin a pass through `loader`; in a forked replica, return the samples of each batch."""
        self._work.draw_own()
        small = self._small(loader)
        self._passes.add(loader)
        self._epoch = max(self._epoch, self._seen[loader])
        self._seen[loader] += 1
        self._norm_passes = self._count_norm_passes()
        return small

    def loading(self, owner: object) -> None:
        """Begin to load a batch of `owner`."""
        self._end_step(owner)
        self._work.draw_own()
        self._following.note_kept(self._whole_models())
        if self.equivalence_check.replica is not None:
            self.equivalence_check.replica.next_batch()
        else:
            self._compare_again()
        self.group.timer.resume("io")

    @property
    def limit(self) -> int | None:
        """In a forked replica, the samples of each batch."""
        replica = self.equivalence_check.replica
        return replica.samples if replica is not None else None

    def loaded(self, loader: DividedLoader, part: BatchPart, batch: Any) -> Any:
        """Begin to compute `part`; return the batch for the program."""
        return self._compute(loader, part, batch, loader.count)

    def is_in_thread(self) -> bool:
        """Whether another thread of the program calls this, or has called it."""
        self._has_threads |= threading.get_ident() != self._thread
        return self._has_threads

    def _refuse_threads(self) -> None:
        """Raise InvalidInput if another thread of the program iterated over a loader, which gave it nothing."""
        if self._has_threads:
            raise InvalidInput(
                "a thread of the program's own goes through a prepared loader, while the nodes exchange gradients: "
                "let the loader load ahead instead, by num_workers="
            )

    def moves_statistics(self) -> bool:
        """Whether norms have computed in training mode since the current pass began."""
        return self._count_norm_passes() > self._norm_passes

    def _whole_models(self) -> list[nn.Module]:
        return [prepared.model for prepared in self._models]

    def _count_norm_passes(self) -> int:
        return sum(model.norm_passes for model in self._models)

    def end(self, loader: DividedLoader, is_over: bool) -> None:
        """End the pass through `loader`, either at its end (`is_over`) or before it."""
        replica = self.equivalence_check.replica
        if replica is not None and self.is_training():
            replica.end_pass(is_over=is_over)
        self._end_step(loader)
        self._work.draw_own()
        self._parts.close(loader, is_over)
        self._following.note_kept(self._whole_models())
        self._passes.discard(loader)

    def before_update(self) -> None:
        """Begin an update."""
        if self._divides_batches and not self._has_divided and not self._has_updated and self.leader:
            message = _LOADER_NOT_TAKEN if self._loaders else _NO_LOADER
            self._env.notify(Event(step=0, kind="undivided", message=message))
        if self._divides_batches and self._parts.are_any and self.is_training():
            refuse_added(self._models, self.steps.optimizers)
        if self.equivalence_check.replica is not None:
            self.equivalence_check.replica.before_update()
        self._work.draw_alike()
        self._has_updated = True
        self.group.timer.pause()
        self.group.timer.resume("wu")

    def after_update(self, optimizer: Optimizer) -> None:
        """End an update by `optimizer`."""
        updated = [weight for group in optimizer.param_groups for weight in group["params"]]
        replica = self.equivalence_check.replica
        if replica is not None and self._following.trains_on_others:
            replica.has_others |= self._undivided.is_further(updated)
        self._compare_undivided(updated)
        self._undivided.end_update(updated)
        self._following.end_update()
        self._work.draw_alike()
        self._is_stepped = True
        self.group.timer.pause()
        self.group.timer.resume("fb")

    def _compare_undivided(self, updated: Sequence[Tensor]) -> None:
        """Tell the user once if gradients of batches that are not divided, for `updated` weights, differ."""
        if self.size == 1 or self.equivalence_check.replica is not None:
            return
        sentence = self._undivided.difference(self._averaged_weights(), updated, may_differ=self._has_gathered)
        self._has_gathered = False
        if sentence and self.leader:
            self._env.notify(Event(step=self.steps.number, kind="differs", message=sentence))

    def _averaged_weights(self) -> Iterator[Tensor]:
        return (weight for one in self._models for weight in one.model.parameters() if one.means.averages(weight))

    def _end_step(self, owner: object) -> None:
        self.group.timer.pause()
        if self.equivalence_check.replica is None:
            if not self._following.is_delayed:
                self.steps.end(owner)
        else:  # a replica has no steps and times its own computation
            self.equivalence_check.replica.end_step(owner)

    def _prepare_weights_outside(self) -> None:
        """Prepare an optimizer's weights that are in no model, like those of a model."""
        weights = [w for one in self.steps.optimizers for group in one.param_groups for w in group["params"]]
        held = {id(weight) for model in self._models for weight in model.model.parameters()}
        outside = [weight for weight in added_weights(weights, self._models) if id(weight) not in held]
        if outside and self._divides_batches:
            self._models.append(self._work.prepared(nn.ParameterList(outside)))
            self._move_states()

    def _move_states(self) -> None:
        """Move the state of all optimizers to the devices of their weights, which `prepare` may have moved."""
        for optimizer in self.steps.optimizers:
            move_state(optimizer)

    @property
    def _has_divided(self) -> bool:
        """Whether a batch has been divided among the nodes."""
        return bool(self._seen) or self._sharing

    @property
    def _divides_batches(self) -> bool:
        return self.size > 1 and not self._work.draws_alike

    def _compare_again(self) -> None:
        """Compare between two steps, if it is time; `EquivalenceCheck.compare_later` says when."""
        if self.size == 1 or not self._has_updated or not self.is_training() or self.part is None:
            return
        if self._following.is_delayed:  # replicas would miss parts of the current batches
            return
        is_epoch = self._epoch.bit_length() > self._compared_epoch.bit_length()  # 1, 2, 4, 8, ...
        is_last = self._is_last_epoch and self._epoch > self._compared_epoch
        has_new_loss = self.steps.take_new_loss()
        self._compared_epoch = self._epoch
        self.equivalence_check.compare_later(
            self._models,
            self.steps.optimizers,
            step=self.steps.number,
            is_due=is_epoch or is_last or has_new_loss,
            seconds=self.steps.seconds,
            samples=self.part.total,
        )
        self._undivided.has_others |= self.equivalence_check.has_others
        self.leader = self.leader and self.equivalence_check.replica is None
        if self.equivalence_check.replica is not None and not self._work.draws_alike:
            self._following.begin(self._whole_models())

    def _small(self, owner: object) -> int | None:
        """Check the first pass over `owner` against one process; in a replica, return the samples of a batch."""
        if self.is_training() and self.equivalence_check.is_new(owner):
            if not self._passes:  # an outer loop was checked already, together with this one
                self._prepare_weights_outside()
                lone = owner.lone_sample() if isinstance(owner, DividedLoader) else ""
                self.steps.tell(self.equivalence_check.perform(self._models, self.steps.optimizers, lone))
                self._draw_alike()
                self._following.is_delayed |= self.equivalence_check.is_delayed
                self._undivided.has_others |= self.equivalence_check.has_others
                if not self._work.draws_alike and (self.equivalence_check.replica or self.equivalence_check.is_delayed):
                    self._following.begin(self._whole_models())
                if self.equivalence_check.is_wanted and self.equivalence_check.replica is None:
                    self.steps.loss_graphs.begin()
            self.leader = self.leader and self.equivalence_check.replica is None
        replica = self.equivalence_check.replica
        return None if replica is None else replica.samples

    def _use(self, batch: HandedBatch, trains: bool) -> None:
        """Begin to compute `batch`, whatever was loaded since."""
        before, self._current = self._current, batch
        is_next = batch is not before or self._is_stepped
        self.part = batch.part
        self._parts.use(batch.number, batch.weight, trains, batch.part.samples > 0)
        for model in self._models:
            model.compute(batch.part)
        replica = self.equivalence_check.replica
        if replica is not None:
            replica.is_delayed = True
        if not trains or not is_next:
            return
        self._is_stepped = False
        if replica is not None:
            if before is not None:
                replica.end_step(before.owner)
            if batch is not before:
                replica.next_batch()
            replica.begin_step(batch.owner, batch.part)
            return
        self.group.timer.pause()
        self.steps.end_any()
        self.steps.begin(batch.owner, batch.part, self.equivalence_check.check)
        self.group.timer.resume("fb")

    def _draw_alike(self) -> None:
        """Synchronise the program's shared random numbers on all nodes, if it has any."""
        shapes = self.equivalence_check.shared_draws
        if self.equivalence_check.replica is not None or self._work.alike_draws is not None:
            return
        shares_all, has_same_generators = self._work.draws_alike, self.group.has_same_generators()
        if shares_all and has_same_generators:  # their generators are in the same states
            return
        if not shares_all and not shapes and not self.group.has_accelerators:  # whose draws may be unknown
            return
        take_leaders_state(self.group)
        self._work.alike_draws = AlikeDraws(
            secrets.randbits(62),
            None if shares_all else shapes,
            () if shares_all else self._whole_models(),
            device=self.device,
            on_processor=not has_same_generators,
            is_compared=self.equivalence_check.check is not None,
        )
        self._work.alike_draws.begin()

    def _compute(self, owner: object, part: BatchPart, batch: Any, count: Count) -> Any:
        """Begin to compute `part`."""
        self.group.timer.pause()
        replica = self.equivalence_check.replica
        if replica is not None:
            batch = replica.prepare_batch(batch, part)
        self.part = part
        if self._divides_batches and self.is_training():
            self._prepare_weights_outside()
            prepare_added(self._models)
        weight = self._work.weight(part, batch, count)
        self._undivided.begin_batch()
        self._following.give(batch, owner, part, weight, self.is_training())
        for model in self._models:
            model.compute(part)
        self._has_updated = self._has_updated and not self.is_training()
        if self.is_training() and replica is not None:
            replica.begin_step(owner, part)
        elif self.is_training():
            if not self._following.is_delayed:
                self.steps.begin(owner, part, self.equivalence_check.check)
            if self.size > 1 and not self._has_own_draws and self._work.alike_draws is None:
                self._work.begin_draws()
                self._has_own_draws = True
        self.group.timer.resume("fb")
        return batch
