"""A checkpoint is reported soon after it is written: a node offers it to its master then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evener.commands.train import run_on_nodes
from evener.config.run_config import RunConfig
from evener.records.events import RunEvent
from evener.records.record import Event, Step
from evener.training.rank import train_rank
from support.commands import TINY


def test_checkpoint_of_an_epoch_of_one_step_is_reported_before_the_run_ends(tmp_path: Path) -> None:
    events: list[RunEvent] = []
    sizes: dict[str, Any] = {"batch_size": 50, "epochs": 5, "option": {"pause": "0.3"}}
    config = RunConfig(task=TINY, devices="cpu", output=tmp_path / "run", check=False, **sizes)
    run_on_nodes(train_rank, config, events.append)
    shown = [(type(event), getattr(event, "step", 0)) for event in events]
    assert shown.index((Event, 1)) < shown.index((Step, 5))
