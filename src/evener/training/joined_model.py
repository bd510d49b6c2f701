"""This rank's part of the model that all ranks of a plan train together: whole, a part of each layer, or a stage."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from torch import nn

from evener.comm.group import Group
from evener.config.run_config import RunConfig
from evener.oracle.division.plan import Arrangement
from evener.oracle.division.rules import division_of
from evener.oracle.schedule import Rematerialise, ScheduleChoice
from evener.oracle.stages import DeviceGroup
from evener.parallel.gradient_hooks import copied
from evener.parallel.norm_statistics import LayerStatistics
from evener.parallel.parallel_model import Criterion, ParallelModel
from evener.parallel.pipeline.sharded_stage import StageTeams
from evener.parallel.pipeline.staged import StagedModel
from evener.parallel.process_mesh import ProcessMesh, form_process_mesh
from evener.parallel.refusals import refuse_parts_of_batches
from evener.parallel.replicated import ReplicatedModel, uses_all
from evener.parallel.sharded import DividedModel
from evener.parallel.shared_statistics import synchronise_norms
from evener.records.decoding import decode_json
from evener.records.plan import WHOLE_MODEL, Plan, is_pipeline
from evener.training.context import RankContext
from evener.training.image_grid import grid_of
from evener.training.predict import predict, silent_mesh


class _Stage(msgspec.Struct, frozen=True):
    """One rank's stage, and the bytes it needs if it keeps the activations of every micro-batch that is on its way."""

    stage: int
    first_layer: str
    share: float
    memory_bytes: int
    reason: str


def join_model(context: RankContext, plan: Plan, config: RunConfig, is_profiled: bool) -> tuple[ParallelModel, Plan]:
    """Return this rank's part of the model, and the plan with its stages and, if `is_profiled`, a predicted step time.

    All ranks of `context`, which are those of `plan`, call this. The model takes over parts of the context's, unless it
    is divided.
    """
    if len(plan.replica_ranks) > 1:
        refuse_parts_of_batches(context.model)
    if plan.strategy in WHOLE_MODEL:
        return _join_replicas(context, plan, config, is_profiled)
    if is_pipeline(plan.strategy):
        return _join_stages(context, plan, config, is_profiled)
    return _join_parts(context, plan, config, is_profiled)


def _join_replicas(
    context: RankContext, plan: Plan, config: RunConfig, is_profiled: bool
) -> tuple[ParallelModel, Plan]:
    """Return the whole model, on every rank."""
    reached = context.uses_all
    if reached is None:
        reaches_all = context.group.is_alone or uses_all(context.model, context.task.loss, *context.samples(2))
        reached = all(context.group.all_gather_bytes(b"all" if reaches_all else b""))

    def build(model: nn.Module, group: Group) -> ParallelModel:
        whole = model if group.is_alone else synchronise_norms(model, group, LayerStatistics)
        return ReplicatedModel(whole, group, _criterion(context), config.compile, reached)

    if is_profiled and context.group.size > 1:
        plan = predict(context, plan, lambda silent: build(copied(context.model), silent))
    return build(context.model, context.group), plan


def _join_parts(context: RankContext, plan: Plan, config: RunConfig, is_profiled: bool) -> tuple[ParallelModel, Plan]:
    """Return a part of every layer: of its filters, channels or rows."""
    mesh = form_process_mesh(context.group, arrangement_of(plan))
    inputs, _ = context.samples(max(1, plan.replica_samples[mesh.index]))

    def build(mesh: ProcessMesh) -> DividedModel:
        recompute = config.rematerialise == "always"
        return DividedModel(context.model, mesh, inputs, _criterion(context), recompute, config.compile)

    if is_profiled:
        plan = predict(context, plan, lambda silent: build(silent_mesh(mesh, silent)), mesh.group)
    model = build(mesh)
    is_divided = any(one.divides for one in model.model.plans)
    return model, plan if is_divided else _undivided(plan)


def _undivided(plan: Plan) -> Plan:
    """Return `plan` for a model that its strategy cannot divide: every rank computes all."""
    reason = f"computes all: no layer of this model can be divided by {plan.strategy}"
    every = tuple(msgspec.structs.replace(one, share=1.0, reason=reason) for one in plan.assignments)
    return msgspec.structs.replace(plan, assignments=every)


def _join_stages(context: RankContext, plan: Plan, config: RunConfig, is_profiled: bool) -> tuple[ParallelModel, Plan]:
    """Return a stage of the model. A twin is profiled once all stages are known."""
    twin = copied(context.model) if is_profiled else None
    schedule = (plan.schedule or "auto") if config.schedule == "auto" else config.schedule

    def build(model: nn.Module, group: Group, plan: Plan) -> StagedModel:
        among = replace(context, model=model, group=group)
        return _staged(among, plan, schedule, config.rematerialise, _teams(plan, config))

    model = build(context.model, context.group, plan)
    plan = _with_stages(plan, model)
    if twin is None or not is_cut_alike(plan):  # a twin could not be cut so
        return model, plan
    return model, predict(context, plan, lambda silent: build(twin, silent, plan))


def arrangement_of(plan: Plan) -> Arrangement:
    """Return how the ranks of `plan` divide filters, channels or rows."""
    rows = [tuple(plan.assignments[rank].share for rank in ranks) for ranks in plan.replica_ranks]
    grids = tuple(grid_of(shares, plan.columns) for shares in rows)
    return Arrangement(division=division_of(plan.strategy), replicas=grids)


def _staged(
    context: RankContext,
    plan: Plan,
    schedule: ScheduleChoice,
    rematerialise: Rematerialise,
    teams: StageTeams | None,
) -> StagedModel:
    """Return a rank's stage of the model, whose parts it takes over."""
    rows = [sorted(ranks, key=lambda rank: plan.assignments[rank].stage) for ranks in plan.replica_ranks]
    firsts = rows[0] if teams is None else [team[0] for team in teams.teams]
    begins = [plan.assignments[rank].first_layer for rank in firsts[1:]]
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
        schedule=schedule,
        rematerialise=rematerialise,
        team=_team(context),
        teams=teams,
    )


def _teams(plan: Plan, config: RunConfig) -> StageTeams | None:
    """Return the teams that divide stages, with the shares of the plan if they are known; None without teams."""
    if plan.members == 1:
        return None
    is_known = config.shares != "measured" or any(a.first_layer for a in plan.assignments)
    shares = tuple(tuple(plan.assignments[rank].share for rank in team) for team in plan.teams)
    return StageTeams(division=division_of(plan.strategy), teams=plan.teams, shares=shares if is_known else None)


def _criterion(context: RankContext) -> Criterion:
    """Return the criterion of a run."""
    arithmetic = context.arithmetic
    return Criterion(loss=context.task.loss, autocast=arithmetic.autocast, scale=arithmetic.scaler.scale)


def _team(context: RankContext) -> DeviceGroup | None:
    """Return the user's memory limits of the ranks; None without limits."""
    rows = context.group.all_gather_bytes(str(context.env.node.memory_bytes or 0).encode())
    granted = [int(row) for row in rows]
    return DeviceGroup(memory=tuple(map(float, granted))) if all(granted) else None


def _with_stages(plan: Plan, model: StagedModel) -> Plan:
    """Return `plan` with the stages of `model`; every rank calls this and gets the same."""
    encoded = msgspec.json.encode(_stage(plan, model))
    rows = [decode_json(row, _Stage) for row in model.group.all_gather_bytes(encoded)]
    assignments = tuple(
        msgspec.structs.replace(a, **msgspec.structs.asdict(row)) for a, row in zip(plan.assignments, rows, strict=True)
    )
    return msgspec.structs.replace(plan, assignments=assignments, schedule=model.pipeline.schedule)


def _stage(plan: Plan, model: StagedModel) -> _Stage:
    partition, micro = model.pipeline.plan, plan.accumulate
    stage = partition.layout.ranks.index(model.group.rank)
    share = partition.work[stage] * model.pipeline.share
    is_undivided = model.pipeline.teams is not None and not model.pipeline.shards
    return _Stage(
        stage=stage,
        first_layer=partition.layout.first_operation(stage),
        share=share,
        memory_bytes=round(partition.weight_bytes[stage] * model.pipeline.share)
        + micro * (partition.boundary_bytes[stage] + partition.kept_bytes[stage])
        + partition.passing_bytes[stage],
        reason="computes all of its stage: no layer of it can be divided"
        if is_undivided
        else f"{share:.0%} of the work of its replica's layers",
    )


def is_cut_alike(plan: Plan) -> bool:
    """Return whether the stages of all replicas begin at the same layers."""
    rows = [sorted((plan.assignments[rank] for rank in ranks), key=lambda a: a.stage) for ranks in plan.replica_ranks]
    return len({tuple(a.first_layer for a in row) for row in rows}) == 1
