"""What Ultralytics' loop decides by itself, on several ranks: all of them decide alike, as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.yolo_cases import Case, draw_detection, needs_ultralytics, train

pytestmark = [needs_ultralytics, pytest.mark.slow]
SETTINGS: dict[str, Any] = {
    "epochs": 4,
    "batch": 4,
    "nbs": 8,
    "imgsz": 64,
    "close_mosaic": 2,
    "warmup_epochs": 1,
    "optimizer": "SGD",
    "seed": 1,
}
MEMORY = 1 << 34, 89_000_000
"""Of two nodes: for whatever is asked; and for the weights, with what the optimiser keeps, and one image."""


def asked(tmp_path: Path, **settings: Any) -> dict[str, Any]:
    return {**SETTINGS, "data": str(draw_detection(tmp_path / "data")), **settings}


@pytest.mark.parametrize("model", ["yolov8n.yaml", "yolo26n.yaml"])
def test_one_node_equals_plain_yolo_bit_for_bit(tmp_path: Path, model: str) -> None:
    """To the last bit, in single precision: loop, loss, norms, averages and validation are Ultralytics' own."""
    settings = asked(tmp_path)
    found = [
        train(Case(model=model, settings=settings, out=str(tmp_path / out), dtype="float32", is_plain=plain), 1)[0]
        for out, plain in (("plain", True), ("evener", False))
    ]
    for state in ("weights", "ema"):
        for name, value in found[0][state].items():
            assert torch.equal(found[1][state][name], value), name
    assert found[1]["metrics"] == found[0]["metrics"]


def test_nodes_equal_plain_yolo_on_the_same_batches(tmp_path: Path) -> None:
    settings = asked(tmp_path)
    plain = train(Case(model="yolov8n.yaml", settings=settings, out=str(tmp_path / "plain"), is_plain=True), 1)[0]
    nodes = train(Case(model="yolov8n.yaml", settings=settings, out=str(tmp_path / "nodes"), shares="3,1"), 2)[1]
    for state in ("weights", "ema"):
        for name, value in plain[state].items():
            assert torch.allclose(nodes[state][name].double(), value.double(), rtol=1e-8, atol=1e-9), name


def test_redistributing_batches_during_a_run_changes_nothing(tmp_path: Path) -> None:
    settings = asked(tmp_path)
    one = train(Case(model="yolov8n.yaml", settings=settings, out=str(tmp_path / "one")), 1)[0]
    case = Case(
        model="yolov8n.yaml", settings=settings, out=str(tmp_path / "two"), shares="3,1", later_seconds=(3.0, 1.0)
    )
    for rank in train(case, 2):
        for name, value in one["weights"].items():
            assert torch.allclose(rank["weights"][name].double(), value.double(), rtol=1e-8, atol=1e-9), name


def test_epoch_with_non_finite_loss_is_repeated_by_all(tmp_path: Path) -> None:
    settings = asked(tmp_path)
    case = Case(model="yolov8n.yaml", settings=settings, out=str(tmp_path / "one"), spoiled_epoch=2)
    one = train(case, 1)[0]
    case = Case(model="yolov8n.yaml", settings=settings, out=str(tmp_path / "two"), shares="3,1", spoiled_epoch=2)
    for rank in train(case, 2):
        assert rank["epochs"] == 4
        for name, value in one["weights"].items():
            assert torch.isfinite(value).all()
            assert torch.allclose(rank["weights"][name].double(), value.double(), rtol=1e-7, atol=1e-8), name


def test_early_stopping_follows_the_validation_of_the_leader(tmp_path: Path) -> None:
    """On the other rank it would, every time."""
    settings = asked(tmp_path, epochs=20, patience=2)
    case = Case(model="yolov8n.yaml", settings=settings, out=str(tmp_path / "out"), shares="3,1", fitness=1.0)
    assert [rank["epochs"] for rank in train(case, 2)] == [3, 3]


def test_step_time_excludes_work_between_epochs(tmp_path: Path) -> None:
    settings = asked(tmp_path, epochs=2, nbs=4)
    found = train(Case(model="yolov8n.yaml", settings=settings, out=str(tmp_path / "out"), save_seconds=1.0), 1)[0]
    assert 0 < found["step_seconds"] <= found["epoch_seconds"]


def test_share_of_a_node_respects_its_memory(tmp_path: Path) -> None:
    """Of one batch, where Ultralytics' AutoBatch would choose another batch; both nodes are equally fast."""
    settings = asked(tmp_path, batch=8, epochs=1)
    case = Case(model="yolov8n.yaml", settings=settings, out=str(tmp_path / "out"), shares="measured", memory=MEMORY)
    assert train(case, 2)[0]["shares"] == [7, 1]
