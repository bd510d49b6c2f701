"""What is asked of the nodes that are left when others of a training of YOLO are lost."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from evener.frontends.yolo.command import is_complete, without
from evener.frontends.yolo.overrides import YoloConfig
from evener.records.record import Event

LOST = Event(step=3, kind="node lost", message="node b was killed; the others go on", nodes=("b",))


def asked(folder: Path, **options: object) -> YoloConfig:
    config = YoloConfig(overrides=("train", "model=yolov8n.yaml", f"save_dir={folder}"))
    return msgspec.structs.replace(config, **options)


def saved(folder: Path, epoch: int) -> Path:
    """A checkpoint as Ultralytics leaves it, as far as it is looked at."""
    path = folder / "weights" / "last.pt"
    path.parent.mkdir()
    torch.save({"epoch": epoch}, path)
    return path


def test_loss_before_the_first_checkpoint_restarts_training(tmp_path: Path) -> None:
    config = asked(tmp_path)
    assert without(config, [0], LOST) == msgspec.structs.replace(config, lost=(LOST,))


def test_restart_resumes_the_last_checkpoint_and_lists_all_losses(tmp_path: Path) -> None:
    last, earlier = saved(tmp_path, epoch=2), msgspec.structs.replace(LOST, step=1, nodes=("c",))
    again = without(asked(tmp_path, lost=(earlier,), shares="3,2,1"), [0, 2], LOST)
    assert again is not None
    assert again.overrides == ("train", f"resume={last}", f"save_dir={tmp_path}")
    assert (again.shares, again.lost) == ("3,1", (earlier, LOST))
    once_more = without(again, [1], LOST)
    assert once_more is not None
    assert (once_more.overrides, once_more.shares) == (again.overrides, "1")


def test_restart_keeps_the_options_of_the_remaining_local_nodes(tmp_path: Path) -> None:
    config = asked(tmp_path, shares="3,2,1", local_nodes="1,0.5,0.2", memory="4GB,2GB,1GB")
    again = without(config, [0, 2], LOST)
    assert again is not None
    assert (again.shares, again.local_nodes, again.memory) == ("3,1", "1,0.2", "4GB,1GB")


def test_complete_training_is_not_restarted(tmp_path: Path) -> None:
    assert is_complete(saved(tmp_path, epoch=-1))
    assert without(asked(tmp_path), [0], LOST) is None


@pytest.mark.parametrize("options", [{"elastic": False}, {"stationary": True}, {"shares": "0,1"}])
def test_node_loss_ends_a_run_that_may_not_or_cannot_restart(tmp_path: Path, options: dict[str, object]) -> None:
    assert without(asked(tmp_path, **options), [0], LOST) is None
