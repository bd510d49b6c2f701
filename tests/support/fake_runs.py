"""Runs as they could have been: uneven nodes, a loss that falls, a rebalancing, a node that computes twice as slow."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from evener.records.plan import Assignment, Plan, Prediction, Rejected
from evener.records.record import Event, NodeStep, NodeSummary, Step, TrainRecord, Validation

NODES = (("ada", "cuda:0", 0.9e-3), ("bob", "cuda:0", 2.1e-3), ("pi-in-the-attic", "cpu", 12e-3))
"""Name, device and seconds per sample."""

Nodes = Sequence[tuple[str, str, float]]

_FIXED, _EXCHANGE, _SENT = 3e-3, 6e-3, 44_000_000


def fake_plan(shares: Sequence[int] = (67, 28, 5), nodes: Nodes = NODES) -> Plan:
    """A plan that gives `nodes` these numbers of samples of a micro-batch."""
    compute = max(_FIXED + share * node[2] for share, node in zip(shares, nodes, strict=True))
    alone = min(_FIXED + sum(shares) * node[2] for node in nodes)
    return Plan(
        strategy="data",
        batch_size=sum(shares),
        assignments=tuple(
            Assignment(
                rank=rank,
                node=name,
                device=device,
                samples=share,
                fixed_seconds=_FIXED,
                sample_seconds=seconds,
                reason=f"{1 / seconds:,.0f} samples/s; done with the others",
            )
            for rank, (share, (name, device, seconds)) in enumerate(zip(shares, nodes, strict=True))
        ),
        prediction=Prediction(
            step_seconds=compute + _EXCHANGE,
            compute_seconds=compute,
            communication_seconds=_EXCHANGE,
            sent_bytes=_SENT,
            alone_seconds=alone,
        ),
        rejected=(
            Rejected(what="equal shares", reason="all would wait for the slowest", step_seconds=0.41),
            Rejected(what="old-laptop cpu", reason="would slow the others down by 12 %"),
        ),
    )


def fake_run(
    shares: Sequence[int] = (67, 28, 5), nodes: Nodes = NODES, num_steps: int = 400, seed: int = 0, events: bool = True
) -> TrainRecord:
    """A run of such a plan with `num_steps` steps and five validations."""
    rng = random.Random(seed)
    plan = fake_plan(shares, nodes)
    steps = tuple(_step(number, plan, nodes, rng) for number in range(1, num_steps + 1))
    validations = tuple(
        Validation(step=at, epoch=index, loss=_loss(at) * 1.1, accuracy=0.98 * (1 - math.exp(-at / 90)), seconds=0.4)
        for index, at in enumerate(range(num_steps // 5, num_steps + 1, max(num_steps // 5, 1)))
        if at > 0
    )
    seconds = sum(step.seconds for step in steps)
    return TrainRecord(
        task="digits",
        plan=plan,
        seed=seed,
        epochs=5,
        precision="fp32",
        seconds=seconds + 0.4 * len(validations),
        samples_per_second=sum(step.samples for step in steps) / seconds if seconds else 0.0,
        final_loss=steps[-1].loss if steps else None,
        validation_accuracy=validations[-1].accuracy if validations else None,
        startup_seconds=3.2,
        steps=steps,
        validations=validations,
        events=_EVENTS if events else (),
        nodes=tuple(_summary(rank, plan, steps, nodes) for rank in range(len(nodes))),
        environment={"evener": "0.1.0", "torch": "2.11.0", "python": "3.12.3"},
    )


_EVENTS = (
    Event(step=60, kind="rebalanced", message="bob gets 2 samples more, ada 2 less: bob computes faster than measured"),
    Event(step=200, kind="checkpoint", message="written to run/checkpoint-200"),
    Event(step=290, kind="rebalanced", message="pi-in-the-attic gets 1 sample less: it slowed down by 31 %"),
)


def _loss(number: int) -> float:
    return 0.08 + 2.2 * math.exp(-number / 70)


def _step(number: int, plan: Plan, nodes: Nodes, rng: random.Random) -> Step:
    computing = [
        _FIXED + a.samples * seconds * rng.uniform(0.95, 1.12)
        for a, (_, _, seconds) in zip(plan.assignments, nodes, strict=True)
    ]
    whole = max(computing) + _EXCHANGE * rng.uniform(0.9, 1.6)
    return Step(
        step=number,
        epoch=number // 80,
        samples=plan.batch_size,
        loss=_loss(number) * rng.uniform(0.85, 1.15),
        seconds=whole + 0.001,
        nodes=tuple(
            NodeStep(
                samples=a.samples,
                io_seconds=0.06 * seconds,
                compute_seconds=0.86 * seconds,
                wait_seconds=whole - seconds,
                update_seconds=0.08 * seconds,
                sent_bytes=_SENT,
            )
            for a, seconds in zip(plan.assignments, computing, strict=True)
        ),
    )


def _summary(rank: int, plan: Plan, steps: Sequence[Step], nodes: Nodes) -> NodeSummary:
    own = [step.nodes[rank] for step in steps]
    return NodeSummary(
        name=nodes[rank][0],
        device=nodes[rank][1],
        share=plan.assignments[rank].samples / plan.batch_size,
        seconds_computing=sum(step.io_seconds + step.compute_seconds + step.update_seconds for step in own),
        seconds_waiting=sum(step.wait_seconds for step in own),
        bytes_sent=sum(step.sent_bytes for step in own),
        bytes_received=sum(step.sent_bytes for step in own),
        peak_memory_bytes=3_456_000_000,
    )
