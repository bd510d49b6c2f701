"""YOLO on accelerators: the weights of one process, also after a lost node, without hidden waits."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from support.accelerator import DEVICE, NEEDS_DEVICE, TOLERANCE
from support.yolo_cases import SETTINGS, Case, draw_detection, needs_ultralytics, off, train
from support.yolo_trainers import Fault

OTHER = "standin:1" if DEVICE.startswith("standin") else DEVICE
PLACES = pytest.mark.parametrize("on", [(DEVICE, OTHER), (DEVICE, "cpu"), ("cpu", DEVICE)], ids="+".join)
pytestmark = [*NEEDS_DEVICE, needs_ultralytics, pytest.mark.slow, pytest.mark.timeout(300)]


def trained(folder: Path, name: str, devices: tuple[str, ...], **words: Any) -> list[dict[str, Any]]:
    """Train on these devices; return the result of each rank, as `yolo_cases.train` does."""
    data = folder / "data" / "data.yaml"
    data = data if data.exists() else draw_detection(folder / "data", count=24)
    settings = {**SETTINGS, "lr0": 1e-3, "warmup_bias_lr": 0.0, "amp": False, "data": str(data)}
    shares = ",".join(str(len(devices) - rank) for rank in range(len(devices)))
    out = str(folder / name)
    case = Case(model="yolov8n.yaml", settings=settings, out=out, shares=shares, devices=devices, **words)
    return train(case, len(devices))


@PLACES
def test_yolo_equals_one_process(tmp_path: Path, on: tuple[str, ...]) -> None:
    (one,) = trained(tmp_path, "one", ("cpu",))
    for rank in trained(tmp_path, "nodes", on):
        assert off(rank["weights"], one["weights"]) < TOLERANCE
        assert off(rank["ema"], one["ema"]) < TOLERANCE


def test_runs_with_validation_learn_what_processors_learn(tmp_path: Path) -> None:
    """Validations exchange losses in PyTorch's inference mode; runs in double precision have none."""
    expected = trained(tmp_path, "processors", ("cpu", "cpu"), dtype="float32")
    for rank, on_processor in zip(trained(tmp_path, "nodes", (DEVICE, OTHER), dtype="float32"), expected, strict=True):
        assert off(rank["weights"], on_processor["weights"]) < 1e-3  # single precision
        assert rank["metrics"].keys() == on_processor["metrics"].keys() != set()


@PLACES
@pytest.mark.parametrize("fault", [Fault("n0", 4, "forward"), Fault("n1", 5, "update")], ids=["leader", "update"])
def test_yolo_with_a_killed_node_equals_one_process(tmp_path: Path, on: tuple[str, ...], fault: Fault) -> None:
    (one,) = trained(tmp_path, "one", ("cpu",))
    ranks = trained(tmp_path, "nodes", on, faults=(fault,))
    assert (tmp_path / "nodes" / "fault0").exists()
    assert ranks
    for rank in ranks:
        assert off(rank["weights"], one["weights"]) < TOLERANCE
        assert rank["samples"] == 24 * 3
        assert any("on with step" in message for message in rank["events"]), rank["events"]


@pytest.mark.skipif(not DEVICE.startswith("standin"), reason="needs a device that counts waits")
@pytest.mark.parametrize("on", [(DEVICE,), (DEVICE, OTHER)], ids="+".join)
def test_batch_of_yolo_waits_once_more_than_that_of_its_own_trainer(tmp_path: Path, on: tuple[str, ...]) -> None:
    (plain,) = trained(tmp_path, "plain", (DEVICE,), is_plain=True, counts_waits=True)
    allowed = waits_of_a_batch(plain) + 1
    for rank in trained(tmp_path, "nodes", on, counts_waits=True):
        assert waits_of_a_batch(rank) <= allowed


def waits_of_a_batch(rank: dict[str, Any]) -> float:
    """The median number of waits from the end of a batch to that of the next."""
    return float(median(b - a for a, b in pairwise(rank["waits"])))
