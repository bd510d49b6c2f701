"""Who writes into the folder of a run, and what the next one does when that rank is gone."""

from __future__ import annotations

from pathlib import Path
from queue import Queue
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.frontends.yolo.run_folder import own_folder, take_folder

HEAD, ROWS = "epoch,loss", [f"{epoch},0.{epoch}" for epoch in range(1, 5)]


class Talk:
    """What stands for the mesh of two ranks: the leader's words, which the other one waits for, and their barriers."""

    def __init__(self, rank: int, said: Queue[bytes], barrier: Barrier) -> None:
        self.peers, self._said, self._barrier = {1 - rank: None}, said, barrier

    def send_to(self, _rank: int, message: bytes, _topic: str = "") -> None:
        self._said.put(message)

    def receive_from(self, _rank: int, _topic: str = "") -> bytes:
        return self._said.get(timeout=20)

    def all_gather(self, message: bytes, _topic: str = "") -> list[bytes]:
        self._barrier.wait(20)
        return [message] * 2


def folders_of(leaders: Path, others: Path) -> list[Path]:
    """Where two ranks write, each the first one of its machine, which have these folders for the run."""
    said, barrier = Queue[bytes](), Barrier(2)
    found = [Path(), Path()]

    def be(rank: int, folder: Path) -> None:
        mesh: Any = Talk(rank, said, barrier)
        device = torch.device("cpu")
        group = Group(rank=rank, size=2, device=device, nodes=["a", "b"], timer=StepTimer(device), mesh=mesh)
        with own_folder(group, folder, is_first_here=True, is_late=False) as own:
            found[rank] = own

    threads = [Thread(target=be, args=(0, leaders)), Thread(target=be, args=(1, others))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_machines_with_separate_disks_write_into_their_own_folders(tmp_path: Path) -> None:
    assert folders_of(tmp_path / "a", tmp_path / "b") == [tmp_path / "a", tmp_path / "b"]
    assert list((tmp_path / "a").iterdir()) == []


def test_first_machine_writes_on_a_shared_disk(tmp_path: Path) -> None:
    first, second = folders_of(tmp_path / "run", tmp_path / "run")
    assert first == tmp_path / "run"
    assert second.parent == tmp_path / "run"
    assert not second.exists()


def trainer_in(folder: Path) -> Any:
    return SimpleNamespace(
        save_dir=folder, last=folder / "weights" / "last.pt", best=folder / "weights" / "best.pt",
        args=SimpleNamespace(save_dir=""), validator=SimpleNamespace(save_dir=folder),
    )  # fmt: skip


def test_next_leader_writes_no_results_before_the_first_epoch_ends(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    take_folder(trainer_in(tmp_path / "own"), tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("written", [0, 2, 3])
def test_next_leader_adds_missing_results_of_its_predecessor(tmp_path: Path, written: int) -> None:
    own, kept = tmp_path / "own", tmp_path / "run"
    (own / "weights").mkdir(parents=True)
    kept.mkdir()
    (own / "results.csv").write_text("\n".join([HEAD, *ROWS[1:3]]) + "\n")
    if written:
        (kept / "results.csv").write_text("\n".join([HEAD, *ROWS[:written]]) + "\n")
    (own / "weights" / "last.pt").write_bytes(b"newer")
    trainer = trainer_in(own)
    take_folder(trainer, kept)
    wanted = ROWS[1:3] if not written else [*ROWS[:2], ROWS[2]]
    assert (kept / "results.csv").read_text().splitlines() == [HEAD, *wanted]
    assert (trainer.last, trainer.best) == (kept / "weights" / "last.pt", kept / "weights" / "best.pt")
    assert trainer.last.read_bytes() == b"newer"
    assert not trainer.best.exists()
