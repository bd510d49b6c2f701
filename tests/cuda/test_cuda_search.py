"""A search goes on when the accelerator of a trial is lost or hangs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.accelerator import DEVICE, NEEDS_DEVICE, devices
from support.commands import TINY, evener

LOSING = str(Path(TINY).with_name("losing.py"))
pytestmark = [*NEEDS_DEVICE, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.skipif(not DEVICE.startswith("standin"), reason="needs a device that can be lost")
@pytest.mark.parametrize("fault", ["lost", "hanging"])
def test_trial_whose_device_fails_begins_again(tmp_path: Path, fault: str) -> None:
    (tmp_path / "here").touch()
    begun = tmp_path / "found" / "trials" / "0000" / "steps-per-epoch"
    words = ("--vary", "samples=40,50,60", "--trials", "4", "--prune", "none", "--epochs", "6", "--no-join")
    on = ("--devices", devices("gpu", "standin:1"), "--patience", "3", "--output", "found")
    environment = {"EVENER_TEST_LOSS": str(tmp_path / "here"), "EVENER_TEST_BEGUN": str(begun)}
    if fault == "hanging":
        environment["EVENER_TEST_HANGS"] = "1"
    ran = evener("tune", LOSING, *words, *on, cwd=tmp_path, timeout=200, **environment)
    assert ran.returncode == 0, ran.stderr
    assert not (tmp_path / "here").exists()
    trials = json.loads((tmp_path / "found" / "study.json").read_text())["trials"]
    assert [one["outcome"] for one in trials] == ["complete"] * 4
    assert sum(one["attempts"] for one in trials) == 1
    (line,) = [line for line in (ran.stdout + ran.stderr).splitlines() if "restarts from epoch" in line]
    assert "lost its device standin:0" in line
