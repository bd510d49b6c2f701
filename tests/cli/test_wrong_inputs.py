"""200 wrong inputs, drawn by a script: each is refused by one sentence, before PyTorch is loaded where it can be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.wrong_inputs import WrongInput, write, wrong_inputs

COUNT, QUICK, SEED = 200, 12, 40
ALL = wrong_inputs(COUNT, SEED)
LOADED = "PyTorch was loaded"
START = f"""
import atexit, sys
atexit.register(lambda: sys.stderr.write("{LOADED}\\n") if "torch" in sys.modules else None)
sys.argv[0] = "evener"
from evener.cli.app import main
main()
"""


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(one, id=f"{number}", marks=[pytest.mark.slow] if number >= QUICK else [])
        for number, one in enumerate(ALL)
    ],
)
def test_invalid_input_is_rejected_in_one_sentence(tmp_path: Path, one: WrongInput) -> None:
    write(one, tmp_path)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("EVENER")}
    ended = subprocess.run(
        [sys.executable, "-c", START, *one.words],
        cwd=tmp_path,
        env={**variables, "EVENER_HOME": str(tmp_path / "home"), "COLUMNS": "160", **one.variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    said = ended.stderr.splitlines()
    assert "Traceback" not in ended.stdout + ended.stderr, one.name
    assert ended.returncode in (2, 3, 4), (one.name, ended.returncode, ended.stderr)
    sentences = [line for line in said if line.startswith("evener: ") and not line.startswith("evener: warning: ")]
    assert len(sentences) == 1, (one.name, said)
    assert not one.is_cheap or LOADED not in said, one.name


def test_invalid_inputs_of_all_kinds_are_drawn() -> None:
    assert len({one.name for one in ALL}) == COUNT
    assert {one.words[0] for one in ALL} >= {
        "train",
        "run",
        "tune",
        "plan",
        "benchmark",
        "up",
        "join",
        "invite",
        "nodes",
    }
    assert sum(not one.is_cheap for one in ALL) > COUNT / 10
