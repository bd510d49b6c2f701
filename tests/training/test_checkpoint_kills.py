"""Fifty processes are killed while they write checkpoints, one after the other: a sound one is always there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
KILLS = 50
_NURSERY = """
import os, random, signal, sys, time; sys.path[:0] = {path!r}
from pathlib import Path
from evener.training.checkpoint import Checkpoints
from support.checkpoint_material import Material

folder, draw, last = Path(sys.argv[1]), random.Random(7), 0
checkpoints, material = Checkpoints(folder), Material(1)

def write(step, told):
    while True:
        step += 1
        material.save(folder, step)
        os.write(told, b"%d\\n" % step)

for _ in range({kills}):
    heard, told = os.pipe()
    if not (writer := os.fork()):
        write(last, told)
    os.close(told)
    with open(heard) as lines:
        last = int(lines.readline())
        time.sleep(draw.uniform(0, 0.03))
        os.kill(writer, signal.SIGKILL)
        last = max([last, *map(int, lines)])
    os.waitpid(writer, 0)
    assert checkpoints.set_aside_damaged() == []
    found = Material(0).load(folder)
    assert found >= last, (found, last)
    print(found - last, flush=True)
    last = found
"""


def test_valid_checkpoint_exists_whenever_the_writer_is_killed(tmp_path: Path) -> None:
    code = _NURSERY.format(path=sys.path, kills=KILLS)
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=110, check=False
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) == KILLS
