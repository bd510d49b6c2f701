"""Makes a rank's part of the model that the plan's ranks train together."""

from __future__ import annotations

from evener.comm.group import Group
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.division.layout import Replica
from evener.oracle.division.plan import Arrangement
from evener.oracle.stages import DeviceGroup
from evener.parallel.batch_norm import synchronise_batch_norm
from evener.parallel.divided import DividedModel
from evener.parallel.parallel_model import Criterion, ParallelModel
from evener.parallel.pipeline.staged import StagedModel
from evener.parallel.process_mesh import ProcessMesh, form_process_mesh
from evener.parallel.replicated import ReplicatedModel
from evener.plan import Plan
from evener.run.order import Order
from evener.run.prepare import Work, example, samples_of
from evener.run.stages import with_stages
from evener.run.strategy import division_of, is_pipeline


def join_model(work: Work, plan: Plan, group: Group, seat: RankEnvironment, order: Order) -> tuple[ParallelModel, Plan]:
    """This rank's part of the model, and the plan with what was decided in making it."""
    if plan.strategy in ("serial", "data"):
        return replicated(work, group), plan
    if is_pipeline(plan.strategy):
        model = staged(work, plan, group, seat, order)
        return model, with_stages(plan, model)
    return divided(work, plan, form_process_mesh(group, arrangement_of(plan)), order), plan


def replicated(work: Work, group: Group) -> ParallelModel:
    """The whole model on every rank of `group`; it is that of `work`, not a copy."""
    model = synchronise_batch_norm(work.model, group) if group.size > 1 else work.model
    return ReplicatedModel(model, group, criterion_of(work), work.settings.compile)


def arrangement_of(plan: Plan) -> Arrangement:
    """How the ranks of `plan` divide filters, channels or rows."""
    rows = [tuple(plan.assignments[rank].share for rank in ranks) for ranks in plan.replica_ranks]
    return Arrangement(division=division_of(plan.strategy), replicas=tuple(Replica(shares=shares) for shares in rows))


def divided(work: Work, plan: Plan, place: ProcessMesh, order: Order) -> ParallelModel:
    """A rank's part of the model, at `place`: a copy."""
    inputs = example(work, max(1, plan.replica_samples[place.index]))
    recompute = order.rematerialise == "always"
    return DividedModel(work.model, place, inputs, criterion_of(work), recompute, work.settings.compile)


def criterion_of(work: Work) -> Criterion:
    """How the loss of a run is computed."""
    return Criterion(loss=work.task.loss, autocast=work.arithmetic.autocast, scale=work.arithmetic.scaler.scale)


def staged(work: Work, plan: Plan, group: Group, seat: RankEnvironment, order: Order) -> StagedModel:
    """A rank's stage of the model, whose parts it takes over."""
    rows = [sorted(ranks, key=lambda rank: plan.assignments[rank].stage) for ranks in plan.replica_ranks]
    begins = [plan.assignments[rank].first_layer for rank in rows[0][1:]]
    inputs, targets = samples_of(work, work.settings.batch_size)
    return StagedModel(
        work.model,
        group,
        next(index for index, ranks in enumerate(rows) if group.rank in ranks),
        criterion_of(work),
        example=work.arithmetic.prepare(inputs),
        targets=work.arithmetic.prepare(targets),
        micro_batches=plan.accumulate,
        replicas=rows,
        stages=begins if begins and all(begins) else None,
        schedule=order.schedule,
        rematerialise=order.rematerialise,
        team=_team(group, seat),
    )


def _team(group: Group, seat: RankEnvironment) -> DeviceGroup | None:
    """The memory that the user granted the ranks; None where he said nothing: then what is free."""
    rows = group.all_gather_bytes(str(seat.node.memory_bytes or 0).encode())
    granted = [int(row) for row in rows]
    return DeviceGroup(memory=tuple(map(float, granted))) if all(granted) else None
