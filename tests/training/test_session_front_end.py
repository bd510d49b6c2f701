"""A front end that trains in its own way on a `TrainingSession`, as docs/adding-a-front-end.md describes it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from evener.comm.joining import leave_group
from evener.data.sampler import Division, ShuffledSampler
from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local
from evener.oracle.apportion import NodeCost
from evener.records.plan import Assignment, Plan
from evener.records.record import TrainRecord
from evener.training.context import join_world
from evener.training.session import TrainingSession
from evener.training.step import StepResult

EPOCHS, SAMPLES, BATCH = 2, 22, 8


def targets() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def fit(env: RankEnvironment, config: dict[str, Any]) -> None:
    """One rank: least squares by hand, without modules or optimizers; the leader reports the weights as metrics."""
    group = join_world(env)
    division = Division(tuple(NodeCost(unit_seconds=1 / share if share else 1e9) for share in config["shares"]))
    sampler = ShuffledSampler(count=SAMPLES, batch_size=BATCH, accumulate=1, seed=3, rank=group.rank, division=division)
    assignments = tuple(
        Assignment(rank=rank, node=node.name, device=node.device, samples=samples, reason="as the test wants it")
        for rank, (node, samples) in enumerate(zip(env.nodes, division.sizes(1, BATCH), strict=True))
    )
    plan = Plan(strategy="data" if group.size > 1 else "serial", batch_size=BATCH, assignments=assignments)
    session = TrainingSession(env, group, plan, division=division, balance=None)
    if group.is_leader:
        env.notify(plan)
    (x, y), weights = targets(), torch.zeros(3, dtype=torch.float64)
    session.start(1)
    for step in range(1, EPOCHS * sampler.steps_per_epoch + 1):
        session.begin_step(step)
        (part,) = sampler.step(step)
        own = torch.from_numpy(part.indices)
        off = x[own] @ weights - y[own]
        loss, gradient = (off**2).sum() / part.total, 2 * x[own].T @ off / part.total
        weights -= 0.1 * group.all_reduce(gradient, "gradients")
        session.end_step(step, StepResult(epoch=part.epoch, samples=len(own), total=part.total, loss=loss))
        session.save_if_due(step)
    session.monitor.settle()
    metrics = {f"w{index}": float(value) for index, value in enumerate(weights)}
    session.validated(step=step, epoch=EPOCHS - 1, loss=0.0, accuracy=None, seconds=0.0, metrics=metrics)
    record = session.record(config["started"], task="fit", seed=3, epochs=EPOCHS, precision="fp64")
    if group.is_leader:
        env.notify(record)
    group.barrier()
    leave_group()


def trained(*shares: int) -> TrainRecord:
    """The record of a run."""
    events: list[Any] = []
    nodes = [NodeSpec(name=f"n{rank}", threads=1) for rank in range(len(shares))]
    config = {"shares": shares, "started": time.time()}
    run_local(fit, nodes, config, patience=30, on_event=events.append)
    return next(event for event in events if isinstance(event, TrainRecord))


def test_front_end_on_the_session_equals_one_process() -> None:
    alone, uneven = trained(1), trained(3, 0, 1)
    assert [step.samples for step in uneven.steps] == [step.samples for step in alone.steps] == [8, 8, 6] * EPOCHS
    assert [step.nodes[1].samples for step in uneven.steps] == [0] * 6
    assert [step.loss for step in uneven.steps] == pytest.approx([step.loss for step in alone.steps], rel=1e-12)
    assert uneven.validations[-1].metrics == pytest.approx(alone.validations[-1].metrics, rel=1e-12)
    for record in (alone, uneven):
        assert 0 < record.startup_seconds < 60  # since the command was given
