"""Trainings of YOLO whose nodes are killed in the middle of an epoch: the weights are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.yolo_cases import SETTINGS, Case, draw_detection, needs_ultralytics, off, train
from support.yolo_trainers import Fault

pytestmark = needs_ultralytics
IMAGES = 24
GENTLE = {"lr0": 1e-3, "warmup_bias_lr": 0.0}
"""Steps that magnify what is rounded less than a training's usual ones, which are off by 2e-7 after twelve."""


def assert_as_one_process(
    folder: Path, faults: tuple[Fault, ...], shares: str = "3,2,1", model: str = "yolov8n.yaml", **settings: Any
) -> list[dict[str, Any]]:
    """Whoever ends the training has what one process has, and knows of all images; what they have."""
    data = draw_detection(folder / "data", count=IMAGES)
    asked = {**SETTINGS, **GENTLE, "epochs": 4, "data": str(data), **settings}
    one = train(Case(model=model, settings=asked, out=str(folder / "one")), 1)[0]
    case = Case(model=model, settings=asked, out=str(folder / "nodes"), shares=shares, faults=faults)
    ranks = train(case, len(shares.split(",")))
    assert ranks
    assert all((folder / "nodes" / f"fault{index}").exists() for index in range(len(faults)))
    for rank in ranks:
        assert off(rank["weights"], one["weights"]) < 1e-9
        assert off(rank["ema"], one["ema"]) < 1e-9
        assert torch.allclose(rank["items"], one["items"], rtol=1e-9)
        assert rank["samples"] == IMAGES * asked["epochs"]
    return ranks


@pytest.mark.parametrize(
    "fault",
    [
        Fault("n2", 5, "forward"),
        Fault("n0", 5, "forward"),
        Fault("n1", 4, "update"),
        Fault("n1", 5, "torn", "n2"),
        Fault("n2", 6, "torn", "n0"),
    ],
    ids=["a node", "the leader", "after the sums", "a torn step", "a torn step and the leader"],
)
def test_killed_node_costs_no_image(tmp_path: Path, fault: Fault) -> None:
    ranks = assert_as_one_process(tmp_path, (fault,))
    assert any("go on with step" in message for message in ranks[0]["events"])
    assert all(0 < rank["goodput"] < 1 for rank in ranks)


def test_batches_with_unreduced_gradients_are_repeated(tmp_path: Path) -> None:
    faults = (Fault("n1", 6, "forward"), Fault("n2", 11, "forward"))
    assert_as_one_process(tmp_path, faults, nbs=32, warmup_epochs=0, epochs=5)


def test_lone_surviving_node_readmits_the_others(tmp_path: Path) -> None:
    faults = (Fault("n1", 4, "forward"), Fault("n0", 4, "update"))
    ranks = assert_as_one_process(tmp_path, faults, epochs=12, lr0=1e-5, model="yolo26n.yaml")
    assert any("came" in message for message in ranks[0]["events"]), ranks[0]["events"]


def test_last_node_writes_all_results_after_losses_in_validation(tmp_path: Path) -> None:
    data = draw_detection(tmp_path / "data", count=IMAGES)
    faults = (Fault("n1", 6, "validate"), Fault("n0", 9, "validate"))
    settings = {**SETTINGS, "epochs": 4, "data": str(data)}
    ranks = train(
        Case(
            model="yolov8n.yaml", settings=settings, out=str(tmp_path / "out"), shares="3,2,1", faults=faults,
            dtype="float32",
        ),
        3,
    )  # fmt: skip
    assert all((tmp_path / "out" / f"fault{index}").exists() for index in range(2))
    assert ranks
    assert all(rank["samples"] == IMAGES * 4 for rank in ranks)
    lines = (tmp_path / "out" / "run0" / "results.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", "1", "2", "3", "4"]
    assert (tmp_path / "out" / "run0" / "weights" / "best.pt").is_file()
