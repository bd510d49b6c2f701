"""Makes a rank's part of the model that the plan's ranks train together."""

from __future__ import annotations

from math import isqrt

from evener.cluster import Seat
from evener.comm import Group
from evener.journey.order import Order
from evener.journey.prepare import Work, example
from evener.journey.stages import with_stages
from evener.journey.strategy import division_of, is_pipeline
from evener.oracle.stages import Team
from evener.oracle.strategies import Arrangement, Replica
from evener.parallel import (
    Criterion,
    DividedModel,
    JointModel,
    Reader,
    ReplicatedModel,
    StagedModel,
    synchronise_batch_norm,
    take_place,
)
from evener.plan import Plan


def join_model(work: Work, plan: Plan, group: Group, seat: Seat, order: Order) -> tuple[JointModel, Plan]:
    """This rank's part of the model, and the plan with what was decided in making it."""
    criterion = Criterion(loss=work.task.loss, autocast=work.arithmetic.autocast, scale=work.arithmetic.scaler.scale)
    if plan.strategy in ("serial", "data"):
        return _replicated(work, group, criterion), plan
    if is_pipeline(plan.strategy):
        return _staged(work, plan, group, seat, order, criterion)
    return _divided(work, plan, group, order, criterion), plan


def _replicated(work: Work, group: Group, criterion: Criterion) -> JointModel:
    model = synchronise_batch_norm(work.model, group) if group.size > 1 else work.model
    return ReplicatedModel(model, group, criterion, work.settings.compile)


def _divided(work: Work, plan: Plan, group: Group, order: Order, criterion: Criterion) -> JointModel:
    rows = [tuple(plan.assignments[rank].share for rank in ranks) for ranks in plan.replica_ranks]
    arrangement = Arrangement(
        division=division_of(plan.strategy), replicas=tuple(Replica(shares=shares) for shares in rows)
    )
    place = take_place(group, arrangement)
    inputs = example(work, max(1, plan.replica_samples[place.index]))
    reader = Reader(work.model)
    operations = len(reader.read(DividedModel.tensors(inputs)).network.operations)
    chunks = isqrt(operations) if order.rematerialise == "always" else 1  # which keeps the least at once
    return DividedModel(work.model, place, inputs, criterion, chunks, reader, work.settings.compile)


def _staged(
    work: Work, plan: Plan, group: Group, seat: Seat, order: Order, criterion: Criterion
) -> tuple[JointModel, Plan]:
    rows = [sorted(ranks, key=lambda rank: plan.assignments[rank].stage) for ranks in plan.replica_ranks]
    replica = next(index for index, ranks in enumerate(rows) if group.rank in ranks)
    begins = [plan.assignments[rank].first_layer for rank in rows[0][1:]]
    model = StagedModel(
        work.model,
        group,
        replica,
        criterion,
        example=example(work, work.settings.batch_size),
        micro_batches=plan.accumulate,
        replicas=rows,
        stages=begins if begins and all(begins) else None,
        schedule=order.schedule,
        rematerialise=order.rematerialise,
        team=_team(group, seat),
    )
    return model, with_stages(plan, model)


def _team(group: Group, seat: Seat) -> Team | None:
    """The memory that the user granted the ranks; None where he said nothing: then what is free."""
    rows = group.all_gather_bytes(str(seat.node.memory_bytes or 0).encode())
    granted = [int(row) for row in rows]
    return Team(memory=tuple(map(float, granted))) if all(granted) else None
