"""While a program of the user's goes on, replicas that do different things are told apart, by name and step."""

from __future__ import annotations

import pytest
import torch

from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment
from evener.records.errors import TrainingFailed
from evener.training.monitor import Monitor
from evener.training.step import StepReport
from support.refusals import refused


def report(rate: float, weight: float) -> StepReport:
    return StepReport(
        step=7, samples=1, total=2, epoch=0, loss=0.0, wall=1.0, timed_samples=1, io=0.0, fb=1.0, wu=0.0, sent=0,
        stop=0, save=0, leave=0, has_loss=1, rate=rate, weight=weight,
    )  # fmt: skip


def monitor() -> Monitor:
    cpu = torch.device("cpu")
    env = RankEnvironment(0, [NodeSpec(name="ada"), NodeSpec(name="bob")], cpu, 1.0, lambda _: None)
    group = Group(rank=0, size=1, device=cpu, nodes=["ada", "bob"], timer=StepTimer(cpu))
    return Monitor(env, group, division=None, balance=None)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (report(0.05, 1.0), "in step 7 the learning rate is 0.1 on node ada and 0.05 on node bob: give schedules"),
        (report(0.1, 1.2), "in step 7 a weight is 1 on node ada and 1.2 on node bob: something that only one node"),
    ],
)
def test_different_learning_rate_or_weight_ends_the_run(other: StepReport, sentence: str) -> None:
    with pytest.raises(TrainingFailed, match=sentence):
        monitor()._refuse_different([report(0.1, 1.0), other])


def test_rounding_differences_between_replicas_are_accepted() -> None:
    monitor()._refuse_different([report(0.1, 1.0), report(0.1 + 1e-15, 1.0 + 1e-6)])


def test_nan_is_accepted_on_all_nodes_and_refused_on_one() -> None:
    nan = float("nan")
    monitor()._refuse_different([report(nan, nan), report(nan, nan)])
    for first, other in ((report(0.1, 1.0), report(nan, 1.0)), (report(0.1, nan), report(0.1, 1.0))):
        with refused(TrainingFailed):
            monitor()._refuse_different([first, other])
