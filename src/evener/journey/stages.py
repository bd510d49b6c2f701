"""What a pipeline decided while it was made, put into the plan: who computes which stage, and what a step will take."""

from __future__ import annotations

from collections import Counter

import msgspec

from evener.oracle import ring_bytes
from evener.parallel import StagedModel
from evener.plan import Plan, Prediction


class _Row(msgspec.Struct, frozen=True):
    """One rank's stage.

    Attributes:
        stage: number of it.
        first_layer: its first operation.
        share: of its replica's work.
        memory_bytes: that it needs if it keeps the activations of every micro-batch that is on its way.
        seconds: of a step of its replica.
        computing: of that, seconds in which it computes.
        sent_bytes: in a step.
    """

    stage: int
    first_layer: str
    share: float
    memory_bytes: int
    seconds: float
    computing: float
    sent_bytes: float


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
    return msgspec.structs.replace(plan, assignments=assignments, prediction=plan.prediction or _prediction(rows))


def _row(plan: Plan, model: StagedModel) -> _Row:
    design, layout, micro = model.pipeline.design, model.pipeline.design.layout, plan.accumulate
    stage = layout.ranks.index(model.group.rank)
    samples = plan.replica_samples[model.replica] * micro
    told = sum(model.pipeline.bytes_to_send(samples).values()) + _bytes_of_gradients(model)
    return _Row(
        stage=stage,
        first_layer=layout.first_operation(stage),
        share=design.work[stage],
        memory_bytes=design.weight_bytes[stage] + micro * (design.boundary_bytes[stage] + design.kept_bytes[stage]),
        seconds=design.division.step_seconds(micro) if design.division else 0.0,
        computing=micro * design.seconds[stage],
        sent_bytes=told,
    )


def _bytes_of_gradients(model: StagedModel) -> float:
    """Bytes that this rank sends to sum gradients of weights that others hold, too: replicas, or tied ones."""
    own = dict(model.pipeline.named_parameters())
    rows = model.group.all_gather_bytes(msgspec.json.encode(list(own)))
    holders = Counter(name for row in rows for name in msgspec.json.decode(row, type=list[str]))
    return sum(ring_bytes(p.nbytes, holders[name]) for name, p in own.items() if p.requires_grad)


def _prediction(rows: list[_Row]) -> Prediction | None:
    """Of the slowest replica; None where the user said where stages begin, so that nothing was measured."""
    slowest = max(rows, key=lambda row: row.seconds)
    if slowest.seconds == 0:
        return None
    computing = max(row.computing for row in rows)
    return Prediction(
        step_seconds=slowest.seconds,
        compute_seconds=computing,
        communication_seconds=0.0,
        waiting_seconds=slowest.seconds - computing,
        sent_bytes=round(max(row.sent_bytes for row in rows)),
        bottleneck="computing of the slowest stage",
    )
