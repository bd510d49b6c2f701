"""A master that was stopped, as while its machine sleeps, does not take that time for silence of its nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.checked_master import CheckedMaster
from support.extreme_values import Change

PATIENCE = 5.0


def states(master: CheckedMaster) -> dict[str, str]:
    return {node.name: node.state for node in master.ask().nodes}


@pytest.fixture
def master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckedMaster:
    made = CheckedMaster(tmp_path, monkeypatch, Change("none", ()), int)
    for peer, name in enumerate(("ada", "bob"), 1):
        made.join(peer, name)
    return made


def test_nodes_of_a_stopped_master_stay_members(master: CheckedMaster) -> None:
    master.pass_time(60.0)
    assert states(master) == {"ada": "present", "bob": "present"}


def test_silence_counts_again_once_the_master_listens(master: CheckedMaster) -> None:
    master.pass_time(60.0)
    for _ in range(int(2 * PATIENCE / 0.3)):
        master.pass_time(0.3)
    assert states(master) == {"ada": "excluded", "bob": "excluded"}


def test_silence_before_the_stop_counts(master: CheckedMaster) -> None:
    for _ in range(int(0.7 * PATIENCE / 0.3)):
        master.pass_time(0.3)
    master.pass_time(60.0)
    assert set(states(master).values()) == {"present"}
    for _ in range(int(0.5 * PATIENCE / 0.3)):
        master.pass_time(0.3)
    assert set(states(master).values()) == {"excluded"}
