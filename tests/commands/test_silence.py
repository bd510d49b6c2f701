"""No command is silent for longer than three seconds before it shows what it does, however long imports take."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.commands import TINY, command
from support.two_machines import on_two_machines

MAX_SILENCE = 3.0
PROGRAM = str(Path(__file__).parents[2] / "examples" / "08_own_program.py")
SLOW_IMPORT = """
import sys, time

class Late:
    is_late = False

    def find_spec(self, name, path, target=None):
        if name in ("numpy", "torch") and not self.is_late:
            self.is_late = True
            time.sleep(6)

sys.meta_path.insert(0, Late())
"""
"""Delays the import of the first large package, as a cold disk does."""


def longest_silence(words: tuple[str, ...], folder: Path, until: str) -> float:
    """Seconds for which a command writes nothing, at most, before it writes `until` or ends."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SLOW_IMPORT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder / "site"), *sys.path])}
    longest, last, written = 0.0, time.monotonic(), b""
    with (
        subprocess.Popen(
            command(*words), cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process,
        selectors.DefaultSelector() as selector,
    ):
        assert process.stdout is not None
        selector.register(process.stdout, selectors.EVENT_READ)
        while until.encode() not in written:
            assert selector.select(60), written
            if not (part := os.read(process.stdout.fileno(), 4096)):
                break
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
            written += part
        process.kill()
    return longest


@pytest.mark.parametrize(
    ("words", "until"),
    [
        (("plan", "resnet50", "--machines", "2xh200"), "Train on"),
        pytest.param(
            ("plan", "resnet50", "--machines", "2xh200", "--scale", "1,2,4"),
            "asynchronous server",
            marks=pytest.mark.slow,
        ),
        pytest.param(("benchmark",), "measuring", marks=pytest.mark.slow),
        pytest.param(("train", TINY, "--output", "run"), "wrote", marks=pytest.mark.slow),
        pytest.param(("run", "--local-nodes", "1,1", PROGRAM), "checking", marks=pytest.mark.slow),
        pytest.param(("trace", "digits"), "wrote", marks=pytest.mark.slow),
    ],
    ids=["plan", "plan --scale", "benchmark", "train", "run", "trace"],
)
def test_command_shows_progress_while_packages_load(words: tuple[str, ...], until: str, tmp_path: Path) -> None:
    assert longest_silence(words, tmp_path, until) < MAX_SILENCE


@pytest.mark.slow
def test_second_torchrun_machine_prints_its_progress(tmp_path: Path) -> None:
    words = ("-m", "evener", "train", TINY, "--epochs", "1", "--output", "run")
    (code, _), (other_code, told) = on_two_machines(words, tmp_path)
    assert (code, other_code) == (0, 0)
    assert [line for line in told.splitlines() if line.startswith("evener: ")]
