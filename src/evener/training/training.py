"""All that a rank's training loop works with: its part of the model, optimiser, schedule, sampler and shares."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from evener.comm.group import Group
from evener.config.run_config import RunConfig
from evener.data.loader import labels_of, seed_all
from evener.data.sampler import Division, Sampler, ShuffledSampler, StationarySampler
from evener.data.shares import class_balanced_shares
from evener.oracle.apportion import NodeCost, weights_to_workers
from evener.oracle.data_parallel import reapportioned, worker_of_assignment
from evener.oracle.rebalance import Balance
from evener.parallel.optimizer import ModelOptimizer
from evener.parallel.parallel_model import ParallelModel
from evener.records.plan import WHOLE_MODEL, Plan
from evener.training.attributes import Owners, owners_of
from evener.training.context import RankContext
from evener.training.joined_model import join_model
from evener.training.task_faults import refuse_scheduler


@dataclass(frozen=True, kw_only=True)
class Training:
    """All that one rank's loop works with.

    Attributes:
        context: of this rank, among those that take part; its model is empty if this rank has a part of it.
        plan: with the decisions made while building the model.
        sampler: the samples of this rank's replica, by step.
        division: of samples among replicas; None if shares are fixed by where the data is.
        balance: the start of re-balancing; None to keep shares fixed.
    """

    context: RankContext
    plan: Plan
    model: ParallelModel
    optimizer: ModelOptimizer
    scheduler: LRScheduler | None
    sampler: Sampler
    division: Division | None
    balance: Balance | None

    @property
    def group(self) -> Group:
        """The ranks that take part."""
        return self.model.group

    @property
    def owners(self) -> Owners:
        """The objects whose attributes are part of the state; tracing has fixed those of a divided model."""
        model = self.context.model if self.plan.strategy in WHOLE_MODEL else None
        return owners_of(model, self.context.task.loss, self.optimizer.inner)

    @property
    def num_steps(self) -> int:
        """The number of steps of the whole run."""
        return self.context.epochs * self.sampler.steps_per_epoch


def make_training(context: RankContext, plan: Plan, config: RunConfig, *, is_predicted: bool = True) -> Training:
    """Return all that the loop of a rank of `plan` needs; all ranks of the context call this.

    With `is_predicted`, the plan gets a predicted step time, unless it is a user's plan that has one.
    """
    task = context.task
    is_profiled = is_predicted and (plan.prediction is None or context.user_plan is None)
    if is_profiled and context.group.size > 1:
        context.begins("profiling", f"{plan.strategy} on {context.group.size} nodes")
    model, plan = join_model(context, plan, config, is_profiled)
    if is_profiled and is_divided_by_costs(plan, config):
        plan = reapportioned(plan)
    seed_update(context, 0)
    optimizer = ModelOptimizer(context.make_optimizer, model.held())
    is_balanced = follows_speeds(config, plan)
    workers = division_workers(plan, is_balanced)
    division = None if config.stationary else Division(workers)
    if plan.strategy not in WHOLE_MODEL:
        context = replace(context, model=nn.Module())  # so that the whole model may be freed, of which this has a part
    training = Training(
        context=context,
        plan=plan,
        model=model,
        optimizer=optimizer,
        scheduler=None,
        sampler=make_sampler(context, plan, model.replica, division),
        division=division,
        balance=Balance(costs=workers, shares=plan.replica_samples) if is_balanced and model.group.size > 1 else None,
    )
    if task.scheduler is None:
        return training
    scheduler = task.scheduler(optimizer.inner, training.num_steps)
    refuse_scheduler(scheduler)
    return replace(training, scheduler=scheduler)


def seed_update(context: RankContext, step: int) -> None:
    """Seed the optimiser's random numbers of `step` (0: its creation), the same on all ranks."""
    seed_all(context.seed, step, 0, 1, device=context.group.device)


def division_workers(plan: Plan, is_balanced: bool) -> tuple[NodeCost, ...]:
    """Return a worker per replica, to divide batches: measured costs if shares follow them, else the plan's shares."""
    firsts = [plan.assignments[ranks[0]] for ranks in plan.replica_ranks]
    if not is_balanced or not all(a.sample_seconds for a in firsts):
        return tuple(weights_to_workers([a.samples for a in firsts], [a.max_samples for a in firsts]))
    return tuple(
        worker_of_assignment(a, min_units=min(1, a.samples)) for a in firsts
    )  # a node without samples could not show that it gained speed


def is_divided_by_costs(plan: Plan, config: RunConfig) -> bool:
    """Return whether `plan` divides samples by measured costs, and has a prediction."""
    is_timed = all(one.sample_seconds for one in plan.assignments)
    return plan.strategy == "data" and plan.prediction is not None and is_timed and follows_speeds(config, plan)


def follows_speeds(config: RunConfig, plan: Plan) -> bool:
    """Return whether samples are divided by measured speeds."""
    return config.shares == "measured" and not config.stationary and plan.strategy in WHOLE_MODEL


def make_sampler(context: RankContext, plan: Plan, replica: int, division: Division | None) -> Sampler:
    """Return the sampler of one replica."""
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
