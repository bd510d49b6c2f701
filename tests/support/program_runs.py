"""Runs of programs whose ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

from evener.comm.group import Group
from evener.frontends.programs.options import ScriptConfig
from evener.frontends.programs.run import Run
from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment


def run_on(group: Group, shares: str, notify: Callable[[object], None] = lambda _: None) -> Run:
    """Return the run of a rank, without a comparison."""
    env = RankEnvironment(
        rank=group.rank,
        nodes=[NodeSpec(name=name) for name in group.nodes],
        device=group.device,
        patience=10,
        notify=notify,
    )
    run = Run(env, group, ScriptConfig(script=Path("program.py"), shares=shares))
    run.equivalence_check.is_wanted = False
    run._unprepared = Mock(**{"end.return_value": ""})  # it sees the optimizers of all threads
    return run
