"""Makes a rank's part of the model that the plan's ranks train together."""

from __future__ import annotations

import msgspec

from evener.oracle.division.layout import Replica
from evener.oracle.division.plan import Arrangement
from evener.oracle.stages import DeviceGroup
from evener.parallel.divided import DividedModel
from evener.parallel.norms import synchronise_batch_norm
from evener.parallel.parallel_model import Criterion, ParallelModel
from evener.parallel.pipeline.staged import StagedModel
from evener.parallel.process_mesh import ProcessMesh, form_process_mesh
from evener.parallel.replicated import ReplicatedModel
from evener.plan import Plan
from evener.run.config import WHOLE_MODEL, is_pipeline
from evener.run.context import RankContext
from evener.run.strategies import division_of


class _Stage(msgspec.Struct, frozen=True):
    """One rank's stage.

    Attributes:
        stage: number of it.
        first_layer: its first operation.
        share: of its replica's work.
        memory_bytes: that it needs if it keeps the activations of every micro-batch that is on its way.
    """

    stage: int
    first_layer: str
    share: float
    memory_bytes: int


def join_model(context: RankContext, plan: Plan) -> tuple[ParallelModel, Plan]:
    """This rank's part of the model, and the plan with what was decided in making it."""
    if plan.strategy in WHOLE_MODEL:
        return replicated(context), plan
    if is_pipeline(plan.strategy):
        model = staged(context, plan)
        return model, _with_stages(plan, model)
    return divided(context, plan, form_process_mesh(context.group, arrangement_of(plan))), plan


def replicated(context: RankContext) -> ParallelModel:
    """The whole model on every rank; it is that of `context`, not a copy."""
    model = synchronise_batch_norm(context.model, context.group) if context.group.size > 1 else context.model
    return ReplicatedModel(model, context.group, _criterion(context), context.config.compile)


def arrangement_of(plan: Plan) -> Arrangement:
    """How the ranks of `plan` divide filters, channels or rows."""
    rows = [tuple(plan.assignments[rank].share for rank in ranks) for ranks in plan.replica_ranks]
    return Arrangement(division=division_of(plan.strategy), replicas=tuple(Replica(shares=shares) for shares in rows))


def divided(context: RankContext, plan: Plan, mesh: ProcessMesh) -> ParallelModel:
    """A rank's part of the model, at its place in `mesh`: a copy."""
    inputs, _ = context.samples(max(1, plan.replica_samples[mesh.index]))
    recompute = context.config.rematerialise == "always"
    return DividedModel(context.model, mesh, inputs, _criterion(context), recompute, context.config.compile)


def staged(context: RankContext, plan: Plan) -> StagedModel:
    """A rank's stage of the model, whose parts it takes over."""
    rows = [sorted(ranks, key=lambda rank: plan.assignments[rank].stage) for ranks in plan.replica_ranks]
    begins = [plan.assignments[rank].first_layer for rank in rows[0][1:]]
    inputs, targets = context.samples(context.batch_size)
    return StagedModel(
        context.model,
        context.group,
        next(index for index, ranks in enumerate(rows) if context.group.rank in ranks),
        _criterion(context),
        example=inputs,
        targets=targets,
        micro_batches=plan.accumulate,
        replicas=rows,
        stages=begins if begins and all(begins) else None,
        schedule=context.config.schedule,
        rematerialise=context.config.rematerialise,
        team=_team(context),
    )


def _criterion(context: RankContext) -> Criterion:
    """How the loss of a run is computed."""
    arithmetic = context.arithmetic
    return Criterion(loss=context.task.loss, autocast=arithmetic.autocast, scale=arithmetic.scaler.scale)


def _team(context: RankContext) -> DeviceGroup | None:
    """The memory that the user granted the ranks; None where he said nothing: then what is free."""
    rows = context.group.all_gather_bytes(str(context.env.node.memory_bytes or 0).encode())
    granted = [int(row) for row in rows]
    return DeviceGroup(memory=tuple(map(float, granted))) if all(granted) else None


def _with_stages(plan: Plan, model: StagedModel) -> Plan:
    """`plan` with the stages that `model` has; every rank calls this and gets the same."""
    own = msgspec.json.encode(_stage(plan, model))
    rows = [msgspec.json.decode(row, type=_Stage) for row in model.group.all_gather_bytes(own)]
    assignments = tuple(
        msgspec.structs.replace(
            a, **msgspec.structs.asdict(row), reason=f"{row.share:.0%} of the work of its replica's layers"
        )
        for a, row in zip(plan.assignments, rows, strict=True)
    )
    return msgspec.structs.replace(plan, assignments=assignments)


def _stage(plan: Plan, model: StagedModel) -> _Stage:
    partition, micro = model.pipeline.plan, plan.accumulate
    stage = partition.layout.ranks.index(model.group.rank)
    return _Stage(
        stage=stage,
        first_layer=partition.layout.first_operation(stage),
        share=partition.work[stage],
        memory_bytes=partition.weight_bytes[stage]
        + micro * (partition.boundary_bytes[stage] + partition.kept_bytes[stage])
        + partition.passing_bytes[stage],
    )
