"""All that one rank's training loop works with, put together once the plan is known."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from evener.comm.group import Group
from evener.data.loader import labels_of
from evener.data.sampler import Division, Sampler, ShuffledSampler, StationarySampler
from evener.data.shares import class_balanced_shares
from evener.oracle.apportion import Balance, Worker, weights_to_workers
from evener.parallel.parallel_model import ParallelModel
from evener.plan import WHOLE_MODEL, Plan
from evener.run.build import join_model
from evener.run.config import RunConfig
from evener.run.context import RankContext


@dataclass(frozen=True, kw_only=True)
class Training:
    """All that one rank's loop works with, ready to go.

    Attributes:
        context: of this rank, among those that take part.
        plan: who does what.
        model: this rank's part in it.
        optimizer: of its parameters.
        scheduler: of the learning rate, or None.
        sampler: the samples of this rank's replica, by step.
        division: of samples among replicas; None if shares are fixed by where the data is.
        balance: what re-balancing starts from; None to leave shares alone.
    """

    context: RankContext
    plan: Plan
    model: ParallelModel
    optimizer: Optimizer
    scheduler: LRScheduler | None
    sampler: Sampler
    division: Division | None
    balance: Balance | None

    @property
    def group(self) -> Group:
        """The ranks that take part."""
        return self.model.group

    @property
    def num_steps(self) -> int:
        """Of the whole run."""
        return self.context.epochs * self.sampler.steps_per_epoch


def make_training(context: RankContext, plan: Plan, config: RunConfig) -> Training:
    """Everything that the loop of a rank needs that takes part in `plan`; all ranks of the context call this."""
    task = context.task
    model, plan = join_model(context, plan, config)
    optimizer = context.make_optimizer(model.parameters())
    is_balanced = config.shares == "measured" and not config.stationary and plan.strategy in WHOLE_MODEL
    workers = _workers(plan, is_balanced)
    division = None if config.stationary else Division(workers)
    training = Training(
        context=context,
        plan=plan,
        model=model,
        optimizer=optimizer,
        scheduler=None,
        sampler=_sampler(context, plan, model.replica, division),
        division=division,
        balance=Balance(workers=workers, shares=plan.replica_samples) if is_balanced and model.group.size > 1 else None,
    )
    return replace(training, scheduler=task.scheduler(optimizer, training.num_steps)) if task.scheduler else training


def _workers(plan: Plan, is_balanced: bool) -> tuple[Worker, ...]:
    """What batches are divided by, one a replica: measured costs if shares follow them, else the plan's shares."""
    firsts = [plan.assignments[ranks[0]] for ranks in plan.replica_ranks]
    if not is_balanced or not all(a.sample_seconds for a in firsts):
        return tuple(weights_to_workers([a.samples for a in firsts], [a.max_samples for a in firsts]))
    return tuple(
        Worker(unit_seconds=a.sample_seconds, fixed_seconds=a.fixed_seconds, most=a.max_samples) for a in firsts
    )


def _sampler(context: RankContext, plan: Plan, replica: int, division: Division | None) -> Sampler:
    if division is not None:
        return ShuffledSampler(
            count=context.num_samples,
            batch_size=context.batch_size,
            accumulate=plan.loaded_micro_batches,
            seed=context.seed,
            rank=replica,
            division=division,
        )
    labels = context.task.labels() if context.task.labels else labels_of(context.train_data)
    parts = class_balanced_shares(labels, [a.samples for a in plan.assignments], context.seed)
    return StationarySampler(
        parts=parts, batch_size=context.batch_size, accumulate=plan.accumulate, seed=context.seed, rank=replica
    )
