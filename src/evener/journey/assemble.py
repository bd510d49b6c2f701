"""Puts together what the training loop works with, once the plan is known."""

from __future__ import annotations

import torch

from evener.cluster import Seat
from evener.comm import Group
from evener.data import Division, Sampler, ShuffledSampler, StationarySampler
from evener.data.labels import labels_of
from evener.data.shares import class_balanced_shares
from evener.journey.prepare import Work
from evener.oracle import Balance, Worker, weights_to_workers
from evener.parallel import DataParallel, synchronise_batch_norm
from evener.plan import Plan
from evener.train import Run


def assemble(work: Work, plan: Plan, group: Group, seat: Seat) -> Run:
    """Everything that the loop needs, now that the plan is known."""
    settings, task = work.settings, work.task
    model = synchronise_batch_norm(work.model, group) if group.size > 1 else work.model
    forward = torch.compile(model) if settings.compile else None
    optimizer = work.make_optimizer(model.parameters())
    workers = _workers(plan, settings.balance)
    division = None if settings.stationary else Division(workers)
    sampler = _sampler(work, plan, group, division)
    steps = settings.epochs * sampler.steps_per_epoch
    balance = Balance(workers=workers, shares=tuple(a.samples for a in plan.assignments))

    def before_step(step: int) -> None:
        seat.at_step(step)
        group.pace.speed = seat.node.speed_at(step)

    return Run(
        task=task,
        settings=settings,
        plan=plan,
        group=group,
        model=model,
        replica=DataParallel(model, group, forward=forward),  # type: ignore[arg-type]
        optimizer=optimizer,
        scheduler=task.scheduler(optimizer, steps) if task.scheduler else None,
        arithmetic=work.arithmetic,
        train_data=work.train_data,
        validation_data=work.validation_data,
        sampler=sampler,
        division=division,
        balance=balance if settings.balance and group.size > 1 else None,
        emit=seat.emit,
        before_step=before_step,
        stop_requested=lambda: seat.stop_asked,
    )


def _workers(plan: Plan, balance: bool) -> tuple[Worker, ...]:
    """What batches are divided by: measured costs if shares follow them, else the plan's shares as they are."""
    if not balance:
        return tuple(
            weights_to_workers([a.samples for a in plan.assignments], [a.max_samples for a in plan.assignments])
        )
    return tuple(
        Worker(unit_seconds=a.sample_seconds, fixed_seconds=a.fixed_seconds, most=a.max_samples)
        for a in plan.assignments
    )


def _sampler(work: Work, plan: Plan, group: Group, division: Division | None) -> Sampler:
    settings = work.settings
    if division is not None:
        return ShuffledSampler(
            count=len(work.train_data),  # type: ignore[arg-type]
            batch_size=settings.batch_size,
            accumulate=settings.accumulate,
            seed=settings.seed,
            rank=group.rank,
            division=division,
        )
    labels = work.task.labels() if work.task.labels else labels_of(work.train_data)
    parts = class_balanced_shares(labels, [a.samples for a in plan.assignments], settings.seed)
    return StationarySampler(
        parts=parts,
        batch_size=settings.batch_size,
        accumulate=settings.accumulate,
        seed=settings.seed,
        rank=group.rank,
    )
