"""The training of a thin task on one node: its checkpoints, its ends, and that an interruption changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from evener.config.run_config import RunConfig
from evener.launch.nodes import NodeSpec
from evener.records.errors import Interrupted, InvalidFile, InvalidInput, MissingFile, NonFiniteLoss
from evener.records.record import Epoch
from evener.search.thin_trial import ThinContext, train_thin
from support.refusals import refused

POINTS = str(Path(__file__).parents[1] / "support_tasks" / "points.py")


def config(folder: Path, *, lr: str = "0.1", width: str = "8", epochs: int = 3, **options: Any) -> RunConfig:
    return RunConfig(task=POINTS, option={"lr": lr, "width": width}, epochs=epochs, output=folder, **options)


def seat(
    epochs: list[Epoch], is_over: Callable[[Epoch], bool] = lambda _: False, stops_after: int = 10**6
) -> ThinContext:
    left = [stops_after]

    def hear(epoch: Epoch) -> bool:
        epochs.append(epoch)
        return is_over(epoch)

    def is_stopping() -> bool:
        left[0] -= 1
        return left[0] < 0

    return ThinContext(NodeSpec(name="node-0"), lambda _: None, hear, is_stopping)


@pytest.mark.parametrize("stops_after", [0, 5, 9])
def test_interruption_at_any_step_changes_nothing(tmp_path: Path, stops_after: int) -> None:
    whole: list[Epoch] = []
    train_thin(seat(whole), config(tmp_path / "whole"))
    pieces: list[Epoch] = []
    with pytest.raises(Interrupted, match=f"stopped after step {stops_after + 1}"):
        train_thin(seat(pieces, stops_after=stops_after), config(tmp_path / "cut"))
    train_thin(seat(pieces), config(tmp_path / "cut", resume=True))
    scores = [
        [(one.epoch, one.step, one.validation and one.validation.loss) for one in each] for each in (whole, pieces)
    ]
    assert scores[0] == scores[1]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut")]
    assert all(np.array_equal(array, weights[1][name]) for name, array in weights[0].items())


def test_run_ends_at_the_requested_epoch(tmp_path: Path) -> None:
    epochs: list[Epoch] = []
    train_thin(seat(epochs, is_over=lambda epoch: epoch.epoch == 1), config(tmp_path))
    assert [epoch.epoch for epoch in epochs] == [0, 1]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_thin_training_errors_are_reported(tmp_path: Path) -> None:
    with refused(MissingFile):
        train_thin(seat([]), config(tmp_path / "none", resume=True))
    with refused(NonFiniteLoss), np.errstate(all="ignore"):
        train_thin(seat([]), config(tmp_path / "wild", lr="1e30"))
    train_thin(seat([]), config(tmp_path / "other"))
    with refused(InvalidFile):
        train_thin(seat([]), config(tmp_path / "other", resume=True, width="9"))


def test_resuming_a_complete_run_trains_no_step(tmp_path: Path) -> None:
    train_thin(seat([]), config(tmp_path))
    weights = tmp_path / "model.safetensors"
    before = load_file(weights)
    weights.unlink()  # as after a kill between the last checkpoint and the results
    epochs: list[Epoch] = []
    train_thin(seat(epochs), config(tmp_path, resume=True))
    assert epochs == []
    assert all(np.array_equal(array, before[name]) for name, array in load_file(weights).items())


@pytest.mark.parametrize("changed", [{"epochs": 2}, {"seed": 5}, {"batch_size": 7}, {"resume": False}])
def test_checkpoint_of_other_settings_is_not_resumed(tmp_path: Path, changed: dict[str, Any]) -> None:
    train_thin(seat([]), config(tmp_path))
    with refused(InvalidInput):
        train_thin(seat([]), config(tmp_path, **{"resume": True, **changed}))
