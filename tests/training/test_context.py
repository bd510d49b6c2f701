"""The start of a rank, before it trains."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

JOIN = """
import sys
import torch
from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment
from evener.training.context import join_world

assert "{module}" not in sys.modules
join_world(RankEnvironment(0, [NodeSpec(name="node-0", device="cpu")], torch.device("cpu"), 0.0, lambda _: None))
assert "{module}" in sys.modules
"""
PROFILER = "torch.profiler._cupti_monitor"


@pytest.mark.skipif(find_spec(PROFILER) is None, reason="this PyTorch imports nothing in the first step")
def test_first_step_imports_nothing_that_a_dying_worker_could_interrupt() -> None:
    subprocess.run([sys.executable, "-c", JOIN.format(module=PROFILER)], check=True)
