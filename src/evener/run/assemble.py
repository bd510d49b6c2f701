"""Puts together what the training loop works with, once the plan is known."""

from __future__ import annotations

import copy
from dataclasses import replace

import msgspec

from evener.comm.group import Group
from evener.data.loader import labels_of
from evener.data.sampler import Division, Sampler, ShuffledSampler, StationarySampler
from evener.data.shares import class_balanced_shares
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.apportion import Balance, Worker, weights_to_workers
from evener.parallel.parallel_model import ParallelModel
from evener.plan import Plan
from evener.run.join_model import join_model
from evener.run.order import Order
from evener.run.prepare import Work
from evener.run.rehearse import predict
from evener.run.running import Run
from evener.run.strategy import is_pipeline


def assemble(work: Work, plan: Plan, group: Group, seat: RankEnvironment, order: Order) -> Run:
    """Everything that the loop needs, now that the plan is known."""
    settings, task = work.settings, work.task
    model, plan = _join(work, plan, group, seat, order)
    optimizer = work.make_optimizer(model.parameters())
    balancing = settings.balance and plan.strategy in ("serial", "data")
    workers = _workers(plan, balancing)
    division = None if settings.stationary else Division(workers)
    sampler = _sampler(work, plan, model, division)
    steps = settings.epochs * sampler.steps_per_epoch

    def before_step(step: int) -> None:
        seat.at_step(step)
        group.timer.pace.speed = seat.node.speed_at(step)

    return Run(
        task=task,
        settings=settings,
        plan=plan,
        model=model,
        optimizer=optimizer,
        scheduler=task.scheduler(optimizer, steps) if task.scheduler else None,
        arithmetic=work.arithmetic,
        train_data=work.train_data,
        validation_data=work.validation_data,
        sampler=sampler,
        division=division,
        balance=Balance(workers=workers, shares=plan.replica_samples) if balancing and group.size > 1 else None,
        emit=seat.notify,
        before_step=before_step,
        stop_requested=lambda: seat.stop_requested,
    )


def _join(work: Work, plan: Plan, group: Group, seat: RankEnvironment, order: Order) -> tuple[ParallelModel, Plan]:
    """This rank's part of the model, and the plan with its stages and what they will take, if it is of a pipeline."""
    if not is_pipeline(plan.strategy) or plan.prediction is not None:
        return join_model(work, plan, group, seat, order)
    twin = replace(work, model=copy.deepcopy(work.model))
    model, plan = join_model(work, plan, group, seat, order)
    if not _is_cut_alike(plan):  # a twin could not be cut so
        return model, plan
    return model, msgspec.structs.replace(plan, prediction=predict(twin, plan, group, seat, order))


def _is_cut_alike(plan: Plan) -> bool:
    """Whether the stages of all replicas begin at the same layers."""
    rows = [sorted((plan.assignments[rank] for rank in ranks), key=lambda a: a.stage) for ranks in plan.replica_ranks]
    return len({tuple(a.first_layer for a in row) for row in rows}) == 1


def _workers(plan: Plan, balancing: bool) -> tuple[Worker, ...]:
    """What batches are divided by, one a replica: measured costs if shares follow them, else the plan's shares."""
    firsts = [plan.assignments[ranks[0]] for ranks in plan.replica_ranks]
    if not balancing:
        return tuple(weights_to_workers([a.samples for a in firsts], [a.max_samples for a in firsts]))
    return tuple(
        Worker(unit_seconds=a.sample_seconds, fixed_seconds=a.fixed_seconds, most=a.max_samples) for a in firsts
    )


def _sampler(work: Work, plan: Plan, model: ParallelModel, division: Division | None) -> Sampler:
    settings = work.settings
    if division is not None:
        return ShuffledSampler(
            count=len(work.train_data),  # type: ignore[arg-type]
            batch_size=settings.batch_size,
            accumulate=1 if is_pipeline(plan.strategy) else plan.accumulate,
            seed=settings.seed,
            rank=model.replica,
            division=division,
        )
    labels = work.task.labels() if work.task.labels else labels_of(work.train_data)
    parts = class_balanced_shares(labels, [a.samples for a in plan.assignments], settings.seed)
    return StationarySampler(
        parts=parts,
        batch_size=settings.batch_size,
        accumulate=settings.accumulate,
        seed=settings.seed,
        rank=model.replica,
    )
