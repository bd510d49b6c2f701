"""Valid frames with hostile contents, in any order: the master lives, and an honest run beside them is exact."""

from __future__ import annotations

from random import Random

import psutil
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from safetensors.numpy import load

from support.agreements import WAYS, distance
from support.hostile_frames import Stage
from support.linear_engine import serial


class HostileMachine(RuleBasedStateMachine):
    """Whatever is sent, a step of the master raises nothing, and the run comes to the end of one process."""

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.stage = Stage(Random(seed))

    @rule(count=st.integers(1, 30))
    def be_hostile(self, count: int) -> None:
        for _ in range(count):
            self.stage.be_hostile()

    @rule()
    def be_honest(self) -> None:
        self.stage.be_honest()

    def teardown(self) -> None:
        stage = getattr(self, "stage", None)
        if stage is None:
            return
        stage.finish()
        assert stage.result is not None
        assert stage.result.kind is None, stage.result.reason
        found = load((stage.folder / "home" / "runs" / "linear-1" / "model.safetensors").read_bytes())
        stage.close()
        assert distance(found, serial(4)) < 1e-12


TestHostileMachine = HostileMachine.TestCase
TestHostileMachine.settings = settings(
    max_examples=6, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_joining_twice_over_one_connection_leaves_no_awaited_node() -> None:
    stage = Stage(Random(0))
    stage.join_over_one_connection("evil-0", "evil-1")
    assert stage.master.nodes.by_name["evil-0"].peer is None
    assert "evil-1" not in stage.master.nodes.by_name
    stage.finish()
    stage.close()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("way", "messages"), [("sync", 1_000_000), ("async", 50_000), ("int8", 50_000)])
def test_million_hostile_messages_change_neither_run_nor_memory(way: str, messages: int) -> None:
    stage = Stage(Random(7), WAYS[way], epochs=200)
    random, process, before = Random(8), psutil.Process(), 0
    while stage.sent.total() < messages:
        stage.be_hostile()
        if random.random() < 0.001:
            stage.be_honest()
        if not before and stage.sent.total() > messages // 10:
            before = process.memory_info().rss
    assert process.memory_info().rss < 1.2 * before
    stage.finish()
    found = load((stage.folder / "home" / "runs" / "linear-1" / "model.safetensors").read_bytes())
    stage.close()
    if way == "sync":
        assert distance(found, serial(200)) < 1e-12
