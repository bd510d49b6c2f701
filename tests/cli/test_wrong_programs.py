"""200 mistakes and unusual environments, drawn by a script: one sentence or a result, and nothing is left behind."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import pytest

from support.wrong_inputs import WrongInput, write
from support.wrong_programs import wrong_programs

COUNT, SEED = 200, 927
ALL = wrong_programs(COUNT, SEED)
START = "import sys; sys.argv[0] = 'evener'; from evener.cli.app import main; main()"
MARK = "EVENER_TEST_MARK"
OF_PYTORCH = "torchinductor_"
CHEAP_SECONDS = 3.0
"""Limit of the time that processors compute for what needs no data, which a busy machine does not change."""


def computed_seconds() -> float:
    """Return the seconds that ended children of this process have computed."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def processes_of(mark: str) -> list[int]:
    """Return the processes that began with this mark."""
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            if f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
        except OSError:  # it has ended, or is another user's
            continue
    return found


def end_processes(mark: str) -> list[int]:
    """End the processes that began with this mark, and return those that were there."""
    left = processes_of(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def new_shared(before: set[str]) -> list[str]:
    """Return Evener's shared memory that was made since, once that of tests beside has had a minute to end."""
    end = time.monotonic() + 60
    while (
        new := [name for name in os.listdir("/dev/shm") if name not in before and "evener" in name]
    ) and time.monotonic() < end:
        time.sleep(0.1)
    return new


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("one", [pytest.param(one, id=f"{number}") for number, one in enumerate(ALL)])
def test_mistake_gives_one_sentence_and_leaves_no_files(tmp_path: Path, one: WrongInput) -> None:
    if one.prefix[:1] == ("unshare",) and os.geteuid() != 0:
        pytest.skip("needs root, to make namespaces")
    work, temporary, mark = tmp_path / "work", tmp_path / "temporary", uuid4().hex
    work.mkdir()
    temporary.mkdir()
    write(one, work)
    shared = set(os.listdir("/dev/shm"))
    variables = {name: value for name, value in os.environ.items() if not name.startswith("EVENER")}
    own = {MARK: mark, "EVENER_HOME": str(tmp_path / "home"), "TMPDIR": str(temporary), "COLUMNS": "160"}
    before = computed_seconds()
    prefix = (*one.prefix, f"PYTHONPATH={os.environ['PYTHONPATH']}") if one.prefix == ("env", "-i") else one.prefix
    try:
        ended = subprocess.run(
            [*prefix, sys.executable, "-c", START, *one.words],
            cwd=work,
            env={**variables, **own, **one.variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=250,
            check=False,
        )
    finally:
        left = end_processes(mark)
    out, error = ended.stdout.decode(errors="replace"), ended.stderr.decode(errors="replace")
    assert not one.is_cheap or computed_seconds() - before < CHEAP_SECONDS, one.name
    assert "Traceback" not in out + error, one.name
    assert not left, one.name
    assert [path.name for path in temporary.iterdir() if OF_PYTORCH not in path.name] == [], one.name
    assert not new_shared(shared), one.name
    if ended.returncode == 0:
        assert one.may_work, (one.name, error)
        return
    assert ended.returncode in (1, 2, 3, 4), (one.name, ended.returncode, error)
    sentences = [line for line in error.splitlines() if line.startswith("evener: ")]
    has_readers = not any("| true" in word for word in one.prefix)
    assert len([line for line in sentences if not line.startswith("evener: warning: ")]) == has_readers, error


def test_mistakes_of_all_kinds_are_drawn() -> None:
    assert len({(one.name, one.prefix) for one in ALL}) == COUNT
    assert {one.words[0] for one in ALL} >= {
        "train",
        "run",
        "tune",
        "plan",
        "benchmark",
        "up",
        "join",
        "report",
        "yolo",
    }
    assert sum(bool(one.prefix or one.variables) for one in ALL) > COUNT / 10
