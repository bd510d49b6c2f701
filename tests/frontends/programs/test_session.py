"""What a program asks of all nodes while it computes a batch, one node of which has no samples of it."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import torch

from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.frontends.programs.options import ScriptConfig
from evener.frontends.programs.session import Run
from evener.frontends.programs.timing_probe import TimingProbe
from evener.launch.nodes import LocalNode
from evener.launch.rank_environment import RankEnvironment
from evener.records.profile import TaskTiming
from support.thread_ranks import together


def test_what_a_timed_copy_computes_is_not_taken_for_what_lies_between_two_steps(tmp_path: Path) -> None:
    group = Group(rank=0, size=1, device=torch.device("cpu"), nodes=["a"], timer=StepTimer(torch.device("cpu")))
    env = RankEnvironment(0, [LocalNode(name="a")], group.device, 10, lambda _: None)
    run = Run(env, group, ScriptConfig(script=Path("program.py")))
    run.equivalence_check.replica = copy = TimingProbe(group, tmp_path / "alone.json", seconds=math.inf)
    for _ in range(7):
        part = run.share(torch.ones(24, 50))
        assert (part @ part.t()).sum() > 0
    copy.write(copy.path)
    batches = msgspec.json.decode(copy.path.read_bytes(), type=TaskTiming).batches
    assert [batch.samples for batch in batches] == [12, 24]
    assert all(batch.forward_seconds > 0 for batch in batches)


def test_what_a_node_without_samples_computes_counts_for_nothing_even_if_it_is_no_number() -> None:
    def work(group: Group) -> tuple[float, float, int]:
        env = RankEnvironment(
            rank=group.rank,
            nodes=[LocalNode(name=name) for name in group.nodes],
            device=group.device,
            patience=10,
            notify=lambda _: None,
        )
        run = Run(env, group, ScriptConfig(script=Path("program.py"), shares="1,0"))
        run.equivalence_check.is_wanted = False
        run.share(torch.ones(4, 2))
        value = 3.0 if group.rank == 0 else math.nan
        return run.mean(value), run.sum(value), int(run.sum(torch.tensor([2 + group.rank])))

    assert together(2, work) == [(3.0, 3.0, 2)] * 2
