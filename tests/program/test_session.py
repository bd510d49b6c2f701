"""What a program asks of all nodes while it computes a batch, one node of which has no samples of it."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from evener.comm.group import Group
from evener.launch.nodes import LocalNode
from evener.launch.rank_environment import RankEnvironment
from evener.program.options import ScriptConfig
from evener.program.session import Run
from support.thread_ranks import together


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
        run.rehearsal.is_wanted = False
        run.share(torch.ones(4, 2))
        value = 3.0 if group.rank == 0 else math.nan
        return run.mean(value), run.sum(value), int(run.sum(torch.tensor([2 + group.rank])))

    assert together(2, work) == [(3.0, 3.0, 2)] * 2
