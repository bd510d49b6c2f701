"""Checkpoints are written beside the training, in order, and a full disk is no end of a run."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from evener.training.checkpoint import Checkpoint, Checkpoints, CheckpointState
from evener.training.saving import CheckpointWriter
from support.full_disk import largest_file


def checkpoint(step: int, size: int = 4) -> Checkpoint:
    state = CheckpointState(
        task="t", step=step, seed=0, batch_size=2, accumulate=1, samples=2, precision="fp32", numbers={}
    )
    return Checkpoint(state=state, weights={"w": torch.full((size,), float(step))}, optimizer={})


class SlowDisk(Checkpoints):
    """Writes nothing before it may."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_write = threading.Event()

    def write(self, checkpoint: Checkpoint) -> Path:
        self.may_write.wait()
        return super().write(checkpoint)


def test_training_waits_for_the_disk_if_two_checkpoints_are_pending(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path)
    with CheckpointWriter(disk) as writer:
        writer.submit(checkpoint(1))
        writer.submit(checkpoint(2))
        assert writer.finished() == []
        threading.Timer(0.05, disk.may_write.set).start()
        writer.submit(checkpoint(3))
        assert writer.finished()[0].step == 1
        assert writer.wait()[-1].step == 3
    assert disk.latest()[1].step == 3


def test_writer_reports_each_checkpoint_once(tmp_path: Path) -> None:
    with CheckpointWriter(Checkpoints(tmp_path)) as writer:
        writer.submit(checkpoint(1))
        [event] = writer.wait()
        assert (event.kind, event.message) == ("checkpoint", f"wrote {tmp_path}/step-00000001")
        assert writer.finished() == writer.wait() == []


def test_writer_exit_waits_for_all_checkpoints(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path)
    with CheckpointWriter(disk) as writer:
        writer.submit(checkpoint(1))
        writer.submit(checkpoint(2))
        threading.Timer(0.05, disk.may_write.set).start()
    assert disk.latest()[1].step == 2


def test_full_disk_is_an_event_and_the_next_checkpoint_tries_again(tmp_path: Path) -> None:
    with CheckpointWriter(Checkpoints(tmp_path)) as writer:
        writer.submit(checkpoint(1))
        writer.wait()
        with largest_file(4096):
            writer.submit(checkpoint(2, size=5000))
            [event] = writer.wait()
        assert event.kind == "no checkpoint"
        assert event.message.startswith(f"cannot write the checkpoint of step 2 in {tmp_path}: ")
        assert event.message.endswith(f"; the last good one is {tmp_path}/step-00000001")
        writer.submit(checkpoint(3, size=5000))
        assert [one.kind for one in writer.wait()] == ["checkpoint"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]
