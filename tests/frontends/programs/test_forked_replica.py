"""Copies of a process: made anew where one stands still before its first line."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from evener.frontends.programs import forked_replica
from evener.frontends.programs.forked_replica import forked, leave_alone
from evener.records.errors import InvalidInput, TrainingFailed
from support.refusals import refused


def forks(monkeypatch: pytest.MonkeyPatch, num_stuck: int) -> list[int]:
    """The copies that are made from now on, of which the first ones stand still."""
    made: list[int] = []
    fork = os.fork

    def fork_one() -> int:
        pid = fork()
        if pid:
            made.append(pid)
        elif len(made) < num_stuck:
            time.sleep(600)
        return pid

    monkeypatch.setattr(os, "fork", fork_one)
    monkeypatch.setattr(forked_replica, "_BEGIN_SECONDS", 1)
    return made


@pytest.mark.parametrize("num_stuck", [0, 1])
def test_stuck_replica_is_ended_and_forked_again(monkeypatch: pytest.MonkeyPatch, num_stuck: int) -> None:
    made = forks(monkeypatch, num_stuck)
    if (pid := forked()) == 0:
        os._exit(7)
    assert len(made) == num_stuck + 1
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    for stuck in made[:-1]:
        with pytest.raises(ChildProcessError):
            os.waitpid(stuck, os.WNOHANG)


def test_fork_fails_after_three_stuck_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    made = forks(monkeypatch, 3)
    with refused(TrainingFailed):
        forked()
    assert len(made) == 3


def test_replica_changes_no_file_outside_its_own_folder(tmp_path: Path) -> None:
    theirs, own = tmp_path / "weights.pt", tmp_path / "own"
    theirs.write_text("kept")
    own.mkdir()

    def changes() -> int:
        """How many changes a copy could make."""
        leave_alone(own)
        made = 0
        for change in (
            lambda: torch.save({}, theirs),
            lambda: theirs.open("wb"),
            theirs.unlink,
            lambda: theirs.rename(own / "stolen"),
            (tmp_path / "folder").mkdir,
        ):
            with suppress(InvalidInput):
                change()
                made += 1
        (own / "result").write_text("written")
        return made

    if (pid := forked()) == 0:
        os._exit(changes())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert theirs.read_text() == "kept"
    assert (own / "result").read_text() == "written"
