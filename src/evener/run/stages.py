"""What a pipeline decided while it was made, put into the plan: who computes which stage."""

from __future__ import annotations

import msgspec

from evener.parallel.pipeline.staged import StagedModel
from evener.plan import Plan


class _Row(msgspec.Struct, frozen=True):
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


def with_stages(plan: Plan, model: StagedModel) -> Plan:
    """`plan` with the stages that `model` has; every rank calls this and gets the same."""
    own = msgspec.json.encode(_row(plan, model))
    rows = [msgspec.json.decode(row, type=_Row) for row in model.group.all_gather_bytes(own)]
    assignments = tuple(
        msgspec.structs.replace(
            a,
            stage=row.stage,
            first_layer=row.first_layer,
            share=row.share,
            memory_bytes=row.memory_bytes,
            reason=f"{row.share:.0%} of the work of its replica's layers",
        )
        for a, row in zip(plan.assignments, rows, strict=True)
    )
    return msgspec.structs.replace(plan, assignments=assignments)


def _row(plan: Plan, model: StagedModel) -> _Row:
    partition, micro = model.pipeline.plan, plan.accumulate
    stage = partition.layout.ranks.index(model.group.rank)
    return _Row(
        stage=stage,
        first_layer=partition.layout.first_operation(stage),
        share=partition.work[stage],
        memory_bytes=partition.weight_bytes[stage]
        + micro * (partition.boundary_bytes[stage] + partition.kept_bytes[stage])
        + partition.passing_bytes[stage],
    )
