"""A program of the user's on several nodes, in five changed lines; alone it is as it was.

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
from collections.abc import Iterable, Iterator
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
from evener.data.alike import print_of, require_alike
from evener.frontends.programs.alike_draws import AlikeDraws
from evener.frontends.programs.batch_lookup import HandedBatch
from evener.frontends.programs.batch_parts import BatchPart, Count, OpenParts, cut_rows, require_count, rows_of
from evener.frontends.programs.batch_tracking import BatchFollowing
from evener.frontends.programs.divided_loader import DividedLoader
from evener.frontends.programs.newcomers import new_weights, refuse_newcomers, take_in
from evener.frontends.programs.options import ScriptConfig
from evener.frontends.programs.prepared import PreparedOptimizer
from evener.frontends.programs.random_state import take_leaders_state
from evener.frontends.programs.rehearsal import Rehearsal
from evener.frontends.programs.steps import Steps, refuse_outside
from evener.frontends.programs.totals import mean_like, numbers_of, total_of
from evener.frontends.programs.work_division import BatchDivision, LayerDivision, Prepared, WorkDivision
from evener.launch.nodes import relative_shares
from evener.launch.rank_environment import RankEnvironment
from evener.records.errors import InvalidInput, require
from evener.records.record import Event, TrainRecord


class Run:
    """A program's nodes, of which this process is one.

    Attributes:
        device: that this node computes on.
        leader: whether this node speaks for all: prints, writes files.
        rank: of this node, from 0.
        size: number of nodes.
        part: of the batch that is computed now, or was last.
        steps: that were performed.
    """

    def __init__(self, env: RankEnvironment, group: Group, config: ScriptConfig | None) -> None:
        self._env, self.group, self._config = env, group, config
        self._is_alone = config is None  # nobody started this as a run: it is the program that it was
        self.device, self.leader, self.rank, self.size = group.device, group.is_leader, group.rank, group.size
        shares = relative_shares(config.shares if config else "measured", group.size)
        layers = config.layers(group.size) if config else None
        self._parts = OpenParts()
        self._work: WorkDivision = BatchDivision(group, self._parts, env.patience, lambda: self.steps.number)
        if layers is not None:
            self._work = LayerDivision(group, layers, self._tell_undivided)
        self.steps = Steps(env, group, shares, layers)
        self._models: list[Prepared] = []
        self._loaders: list[DividedLoader] = []
        self.part: BatchPart | None = None
        self._has_own_draws = self._sharing = False
        self._has_updated = self._is_again = self._was_again = False
        self._norm_passes = 0
        self._thread, self._has_threads = threading.get_ident(), False
        self._alike_draws: AlikeDraws | None = None
        self._current: HandedBatch | None = None
        self._is_stepped = False
        self._passes: set[object] = set()
        self._seen: set[object] = set()
        may_differ, named = bool(config and config.approximate), layers.division if layers else None
        self._following = BatchFollowing(self._parts, self._use, lambda: self.group.size > 1)
        self.rehearsal = Rehearsal(env, group, shares, is_wanted=group.size > 1, may_differ=may_differ, layers=named)

    def prepare(self, *things: Any, count: Count = "samples") -> Any:
        """Models, optimisers, loaders (and schedulers, scalers) as all nodes use them together, in the same order.

        Models and optimisers stay the objects that they are. A loader gives this node's part of every batch of the
        user's: `batch_size` is that of a step over all nodes.

        Args:
            things: of the program.
            count: what the loss is a mean over: the samples of a batch; or what `count(batch)` says, such as tokens or
                class weights; "sum" if it is no mean but a sum.

        Raises:
            InvalidInput: there is no way to share it; says what to do.
        """
        require_count(count)
        made = things if self._is_alone else tuple(self._prepared(thing, count) for thing in things)
        return made[0] if len(made) == 1 else made

    def epochs(self, rounds: int | Iterable[Any]) -> Iterator[Any]:
        """The numbers 0 to `rounds` - 1, or what `rounds` gives; at the beginning of each, all nodes draw alike."""
        for index, value in enumerate(range(rounds) if isinstance(rounds, int) else rounds):
            self.begin_epoch(index)
            yield value
            self._refuse_threads()

    def begin_epoch(self, index: int) -> None:
        """Epoch `index` begins; every node calls this."""
        self.steps.epoch = index
        self._is_again = self._is_again or index > 0
        self._work.draw_own()
        if self.size > 1:
            take_leaders_state(self.group, message_topics.epoch(index))
            self._has_own_draws = False

    def share(self, batch: Any, dim: int = 0, count: Count = "samples") -> Any:
        """This node's part of a batch that the program made without a loader, the same on all nodes.

        Args:
            batch: a tensor, or a nest of tensors with the samples in `dim`.
            dim: likewise.
            count: as of `prepare`.

        Raises:
            InvalidInput: the nodes have different batches.
        """
        require_count(count)
        if self._is_alone:
            return batch
        self._sharing = True
        self.loading(self)
        small = self._small(self)
        if self._alike_draws is not None:
            take_leaders_state(self.group)
        if small is not None:
            batch = cut_rows(batch, BatchPart(first=0, samples=0, total=0, loaded=small), dim)
        require_alike(
            self.group, print_of(batch), "run.share divides a batch that is the same on all nodes: seed them alike"
        )
        part = self.part_of(rows_of(batch, dim), self.is_training())
        return self._compute(self, part, cut_rows(batch, part, dim), count)

    def mean(self, value: Any) -> Any:
        """Of a loss, or another mean, of this node's part: that of the whole batch. Every node calls this.

        Raises:
            InvalidInput: no batch is under way.
        """
        if self._is_alone:
            return value.detach() if isinstance(value, Tensor) else value
        if not self._work.draws_alike:  # else what a node has is of the whole batch, whenever it was loaded
            refuse_outside(self._parts.are_any, bool(self._loaders) or self._sharing, "run.mean")
        weight = self._parts.weight() / self.group.size
        own = numbers_of(value) * weight if weight else np.zeros_like(numbers_of(value))
        if own.size == 1:
            self.steps.tell_loss(float(own.sum()))
        return mean_like(value, total_of(self.group, "mean", own, self._env.patience))

    def sum(self, value: Any) -> Any:
        """The sum over all nodes of a number or a tensor. Every node calls this."""
        return value if self._is_alone else self._work.sum(value)

    def ratio(self, numerator: Tensor, denominator: Any) -> Tensor:
        """A loss that is a sum by a number, such as of tokens, in the place of `count`; every node differentiates this.

        The loss of the batch is the sum of all nodes' numerators by that of their denominators.

        Args:
            numerator: the sum over this node's part of the batch, a scalar.
            denominator: what it is divided by, zero or more.
        """
        own = float(denominator)
        require(own >= 0, "run.ratio: denominator", own, "zero or more")
        if not self._is_alone:
            own = own if self._parts.weight() else 0.0
            whole = float(total_of(self.group, "ratio", np.asarray(own), self._env.patience))
            self._parts.reweigh(self.group.size * own / whole if whole else 0.0)
        return numerator / (own or 1.0)

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all nodes, in the order of the batch; differentiable. Every node calls this."""
        return rows if self._is_alone else self._work.gather(rows)

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's state dict, as plain PyTorch loads it."""
        state = model.state_dict()
        return {name.removeprefix("_orig_mod."): tensor.detach() for name, tensor in state.items()}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients stay on this node: for all but the last batch of a step that accumulates several."""
        with ExitStack() as stack:
            for model in self._models:
                stack.enter_context(model.means.accumulating())
            yield

    def finish(self, **fields: Any) -> TrainRecord | None:
        """The record of what the program did, on every node; None if it trained nothing. Every node calls this once.

        Args:
            fields: of the record, as far as they are known better than from outside.
        """
        assert self._config is not None
        self.rehearsal.collect(wait=True)
        self._refuse_threads()
        self._following.end()
        if self._alike_draws is not None:
            self._alike_draws.end()
        return self.steps.finish(self._config.started, **{"task": self._config.script.stem, **fields})

    def _prepared(self, thing: Any, count: Count) -> Any:
        if isinstance(thing, nn.Module):
            if self.size == 1:
                return thing.to(self.device)
            self._models.append(self._work.prepared(thing))
            self._following.add(self._models[-1].model)
            return self._models[-1].model
        if isinstance(thing, Optimizer):
            self.steps.follow(PreparedOptimizer(thing, self).optimizer)
            return thing
        if isinstance(thing, DataLoader):
            self._loaders.append(DividedLoader(thing, self, count))
            return self._loaders[-1]
        if isinstance(thing, LRScheduler | torch.amp.GradScaler) or hasattr(thing, "step"):
            return thing
        raise InvalidInput(f"run.prepare takes models, optimisers and loaders, got {type(thing).__name__}")

    def _tell_undivided(self, sentence: str) -> None:
        self.steps.tell([Event(step=self.steps.number, kind="undivided", message=sentence)])

    # what loaders and optimisers tell

    @property
    def draws_alike(self) -> bool:
        """As `Divider`."""
        return self._work.draws_alike or self._alike_draws is not None

    @property
    def loads_alike(self) -> bool:
        """As `Divider`."""
        return self._work.draws_alike

    def part_of(self, count: int, is_training: bool) -> BatchPart:
        """As `Divider`."""
        understudy = self.rehearsal.understudy
        sizes = partial(self.steps.sizes, is_training=is_training) if understudy is None else understudy.sizes
        return self._work.part(count, sizes)

    def is_training(self) -> bool:
        """As `Divider`: somebody could call `backward()`, and a model is in training mode."""
        training = [model.model.training for model in self._models]
        return torch.is_grad_enabled() and (any(training) or not training)

    def begin(self, loader: DividedLoader) -> int | None:
        """As `Divider`."""
        self._work.draw_own()
        small = self._small(loader)
        self._passes.add(loader)
        self._is_again = self._is_again or loader in self._seen
        self._seen.add(loader)
        self._norm_passes = self._count_norm_passes()
        return small

    def loading(self, owner: object) -> None:
        """As `Divider`."""
        self._end_step(owner)
        self._work.draw_own()
        self._following.note_kept(self._whole_models())
        if self.rehearsal.understudy is not None:
            self.rehearsal.understudy.next_batch()
        else:
            self._compare_again()
        self.group.timer.resume("io")

    @property
    def limit(self) -> int | None:
        """As `Divider`."""
        understudy = self.rehearsal.understudy
        return understudy.samples if understudy is not None else None

    def loaded(self, loader: DividedLoader, part: BatchPart, batch: Any) -> Any:
        """As `Divider`."""
        return self._compute(loader, part, batch, loader.count)

    def is_in_thread(self) -> bool:
        """As `Divider`."""
        self._has_threads |= threading.get_ident() != self._thread
        return self._has_threads

    def _refuse_threads(self) -> None:
        """Raises InvalidInput: a thread of the program's own has gone through a loader, which gave it nothing."""
        if self._has_threads:
            raise InvalidInput(
                "a thread of the program's own goes through a prepared loader, while the nodes exchange gradients: "
                "let the loader load ahead instead, by num_workers="
            )

    def moves_statistics(self) -> bool:
        """As `Divider`."""
        return self._count_norm_passes() > self._norm_passes

    def _whole_models(self) -> list[nn.Module]:
        return [prepared.model for prepared in self._models]

    def _count_norm_passes(self) -> int:
        return sum(model.norm_passes for model in self._models)

    def end(self, loader: DividedLoader, is_over: bool) -> None:
        """As `Divider`."""
        understudy = self.rehearsal.understudy
        if understudy is not None and understudy.ends_with_pass and self.is_training():
            understudy.end()
        self._end_step(loader)
        self._work.draw_own()
        self._parts.close(loader, is_over)
        self._following.note_kept(self._whole_models())
        self._passes.discard(loader)

    def before_update(self) -> None:
        """As `Updates`."""
        if self._divides_batches and self._parts.are_any and self.is_training():
            refuse_newcomers(self._models, self.steps.optimizers)
        if self.rehearsal.understudy is not None:
            self.rehearsal.understudy.before_update()
        self._work.draw_alike()
        self._has_updated = True
        self.group.timer.pause()
        self.group.timer.resume("wu")

    def after_update(self) -> None:
        """As `Updates`."""
        self._work.draw_alike()
        self._is_stepped = True
        self.group.timer.pause()
        self.group.timer.resume("fb")

    def _end_step(self, owner: object) -> None:
        self.group.timer.pause()
        if self.rehearsal.understudy is None:
            if not self._following.is_delayed:
                self.steps.end(owner)
        else:  # a copy has no steps: it times what it computes itself
            self.rehearsal.understudy.end_step(owner)

    def _prepare_weights_outside(self) -> None:
        """Weights that an optimiser trains, and that are in no model, are prepared like a model's."""
        weights = [w for one in self.steps.optimizers for group in one.param_groups for w in group["params"]]
        held = {id(weight) for model in self._models for weight in model.model.parameters()}
        outside = [weight for weight in new_weights(weights, self._models) if id(weight) not in held]
        if outside and self._divides_batches:
            self._models.append(self._work.prepared(nn.ParameterList(outside)))

    @property
    def _divides_batches(self) -> bool:
        return self.size > 1 and not self._work.draws_alike

    def _compare_again(self) -> None:
        """Between two steps, if it is time: see `Rehearsal.compare_later`."""
        if self.size == 1 or not self._has_updated or not self.is_training() or self.part is None:
            return
        if self._following.is_delayed:  # batches are under way, of which a copy would have a part
            return
        is_epoch = self._is_again and not self._was_again
        self._was_again = self._was_again or is_epoch
        self.rehearsal.compare_later(
            self._models,
            self.steps.optimizers,
            step=self.steps.number,
            is_epoch=is_epoch,
            seconds=self.steps.seconds_per_step,
            samples=self.part.total,
        )
        self.leader = self.leader and self.rehearsal.understudy is None
        if self.rehearsal.understudy is not None and not self._work.draws_alike:
            self._following.begin(self._whole_models())

    def _small(self, owner: object) -> int | None:
        """In a copy, the samples of a batch. What is trained on `owner` is held against one process, the first time."""
        if self.is_training() and self.rehearsal.is_new(owner):
            if not self._passes:  # else it was in the rehearsal of the loader beside which it is gone through
                self._prepare_weights_outside()
                lone = owner.lone_sample() if isinstance(owner, DividedLoader) else ""
                self.steps.tell(self.rehearsal.perform(self._models, self.steps.optimizers, lone))
                self._draw_alike()
                self._following.is_delayed |= self.rehearsal.is_delayed
                if not self._work.draws_alike and (self.rehearsal.understudy or self.rehearsal.is_delayed):
                    self._following.begin(self._whole_models())
            self.leader = self.leader and self.rehearsal.understudy is None
        understudy = self.rehearsal.understudy
        return None if understudy is None else understudy.samples

    def _use(self, batch: HandedBatch, trains: bool) -> None:
        """This rank computes `batch` from now on, whatever was loaded since."""
        before, self._current = self._current, batch
        is_next = batch is not before or self._is_stepped
        self.part = batch.part
        self._parts.use(batch.number, batch.weight, trains)
        for model in self._models:
            model.compute(batch.part)
        understudy = self.rehearsal.understudy
        if understudy is not None:
            understudy.is_delayed = True
        if not trains or not is_next:
            return
        self._is_stepped = False
        if understudy is not None:
            if before is not None:
                understudy.end_step(before.owner)
            if batch is not before:
                understudy.next_batch()
            understudy.begin_step(batch.owner, batch.part)
            return
        self.group.timer.pause()
        self.steps.end_any()
        self.steps.begin(batch.owner, batch.part, self.rehearsal.check)
        self.group.timer.resume("fb")

    def _draw_alike(self) -> None:
        """If the program draws for no samples, let it draw that alike on all nodes from now on."""
        shapes = self.rehearsal.shared_draws
        if self.rehearsal.understudy is not None or self._work.draws_alike:
            return
        if self._alike_draws is None and (shapes or self.device.type != "cpu"):  # of a GPU nobody knows
            take_leaders_state(self.group)
            self._alike_draws = AlikeDraws(secrets.randbits(62), shapes, self._whole_models())
            self._alike_draws.begin()

    def _compute(self, owner: object, part: BatchPart, batch: Any, count: Count) -> Any:
        """From now on this rank computes `part`."""
        self.group.timer.pause()
        understudy = self.rehearsal.understudy
        if understudy is not None:
            batch = understudy.given(batch, part)
        self.part = part
        if self._divides_batches and self.is_training():
            self._prepare_weights_outside()
            take_in(self._models)
        weight = self._work.weight(part, batch, count)
        self._following.give(batch, owner, part, weight, self.is_training())
        for model in self._models:
            model.compute(part)
        self._has_updated = self._has_updated and not self.is_training()
        if self.is_training() and understudy is not None:
            understudy.begin_step(owner, part)
        elif self.is_training():
            if not self._following.is_delayed:
                self.steps.begin(owner, part, self.rehearsal.check)
            if self.size > 1 and not self._has_own_draws and self._alike_draws is None:
                self._work.begin_draws()
                self._has_own_draws = True
        self.group.timer.resume("fb")
        return batch
