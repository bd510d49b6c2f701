"""A trial of PyTorch is heard while it trains, on one node as on several, and lost when it falls silent."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from evener.config.run_config import RunConfig
from evener.launch.nodes import NodeSpec
from evener.launch.processes import LocalProcesses
from evener.records.errors import NodeLost
from evener.search.torch_trial import TorchTrial
from support.commands import TINY


@pytest.mark.timeout(100)
@pytest.mark.slow
@pytest.mark.parametrize("names", ["a", "ab"])
def test_frozen_trial_is_lost_within_the_patience(names: str, tmp_path: Path) -> None:
    config = RunConfig(task=TINY, epochs=100, option={"pause": "0.2"}, check=False, patience=1.0, output=tmp_path / "t")
    with LocalProcesses([]) as processes:
        trial = TorchTrial(processes, [NodeSpec(name=name) for name in names], config)
        while not processes.receive(1.0):  # it measures, and shows so
            assert not any(process.has_ended for process in trial.processes)
        looked = time.monotonic()
        while time.monotonic() < looked + 2.0 * config.patience:
            processes.receive(0.1)
            assert not trial.is_silent(time.monotonic())
        for process in trial.processes:
            assert process.process.pid is not None
            os.kill(process.process.pid, signal.SIGSTOP)
        frozen = time.monotonic()
        while not trial.is_silent(time.monotonic()):
            assert time.monotonic() < frozen + 10.0 * config.patience
            time.sleep(0.05)
        error = trial.error()
        assert isinstance(error, NodeLost)
        assert error.nodes == tuple(names)
        trial.close()
