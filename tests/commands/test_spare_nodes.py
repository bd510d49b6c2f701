"""What the nodes of a local run do without a lost one: before its first step, and where a plan uses one node."""

from __future__ import annotations

from pathlib import Path

import pytest

from evener.commands.train import SpareNodes
from evener.config.run_config import RunConfig
from evener.records.plan import Assignment, Plan
from evener.records.record import Event, Step

LOST = Event(step=0, kind="node lost", message="node-1 was killed", nodes=("node-1",))
STEP = Step(step=1, epoch=0, samples=8, loss=0.5, seconds=0.1, nodes=())


def config(tmp_path: Path, **options: object) -> RunConfig:
    return RunConfig(task="tiny", output=tmp_path, local_nodes="1,0.5,0.25@40=0.1", **options)  # type: ignore[arg-type]


def plan_of(*samples: int) -> Plan:
    assignments = [Assignment(rank=i, node=f"node-{i}", device="cpu", samples=n) for i, n in enumerate(samples)]
    return Plan(strategy="data", batch_size=sum(samples), assignments=tuple(assignments))


def spare_nodes(*samples: int, has_trained: bool = False) -> SpareNodes:
    spare = SpareNodes(lambda _: None)
    if samples:
        spare.show(plan_of(*samples))
    if has_trained:
        spare.show(STEP)
    return spare


@pytest.mark.parametrize("samples", [(), (4, 4)])
def test_loss_before_the_first_step_restarts_with_the_same_settings(tmp_path: Path, samples: tuple[int, ...]) -> None:
    before = config(tmp_path)
    assert spare_nodes(*samples).take(before, [0, 2], LOST) == before


def test_named_shares_of_the_remaining_nodes_are_used(tmp_path: Path) -> None:
    instead = spare_nodes().take(config(tmp_path, shares="3,2,1", memory="1GB,2GB,3GB"), [0, 2], LOST)
    assert instead is not None
    assert (instead.shares, instead.memory, instead.local_nodes) == ("3,1", "1GB,3GB", "1,0.25@40=0.1")


def test_nodes_without_a_share_do_not_restart(tmp_path: Path) -> None:
    assert spare_nodes().take(config(tmp_path, shares="3,0,0"), [1, 2], LOST) is None


@pytest.mark.parametrize("strategy", ["filter", "pipeline"])
def test_sharded_model_does_not_restart_on_fewer_nodes(tmp_path: Path, strategy: str) -> None:
    assert spare_nodes(4, 4).take(config(tmp_path, strategy=strategy), [0, 2], LOST) is None


def test_only_spare_nodes_continue_after_the_first_step(tmp_path: Path) -> None:
    assert spare_nodes(4, 4, has_trained=True).take(config(tmp_path), [0, 2], LOST) is None
    instead = spare_nodes(8, has_trained=True).take(config(tmp_path), [0, 2], LOST)
    assert instead is not None
    assert not instead.resume
