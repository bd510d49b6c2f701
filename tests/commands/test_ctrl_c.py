"""Ctrl-C ends every command within two seconds, in every phase of it, with one word and nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.commands import command, processes_of

BOUND = 2.0
"""Seconds from Ctrl-C to the end of a command, as documented."""
_TRIES = 3
ENDED = (130, -signal.SIGINT)
"""Exit codes, of which a shell makes 130; Python takes the second if it was interrupted amid an `exec` of an import."""

NODES = ("--local-nodes", "1,0.5")
TUNE = ("tune", "digits", "--trials", "4", "--vary", "channels=8..64:log", *NODES)
MOMENTS = [
    pytest.param(("plan", "resnet152", "--machines", "4xv100-node", "--scale", "1..1024"), 0.3, id="plan, imports"),
    pytest.param(("plan", "resnet152", "--machines", "4xv100-node", "--scale", "1..1024"), 1.5, id="plan, at work"),
    pytest.param(("benchmark", *NODES), 1.0, id="benchmark, imports"),
    pytest.param(("benchmark", *NODES), 3.0, id="benchmark, processes start"),
    pytest.param(("benchmark", *NODES), "measuring: ", id="benchmark, measures"),
    pytest.param(("benchmark",), "measuring: ", id="benchmark of this process"),
    pytest.param(("train", "digits", *NODES), 3.0, id="train, processes start"),
    pytest.param(("train", "digits", *NODES), "measuring: ", id="train, measures"),
    pytest.param(("train", "digits", *NODES, "--epochs", "50"), "step ", id="train, trains"),
    pytest.param(("train", "digits", "--epochs", "50"), "step ", id="train in this process"),
    pytest.param(TUNE, 3.0, id="tune, processes start"),
    pytest.param(TUNE, 10.0, id="tune, trials"),
    pytest.param(("experiment", "gpipe"), 1.0, id="gpipe, imports"),
    pytest.param(("experiment", "gpipe"), 12.0, id="gpipe, measures"),
    pytest.param(("experiment", "resnet152-strategies"), 4.0, id="resnet152-strategies, processes start"),
    pytest.param(("experiment", "resnet152-strategies"), 12.0, id="resnet152-strategies, measures"),
]


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize(("words", "moment"), MOMENTS)
def test_ctrl_c_ends_a_command_within_two_seconds(words: tuple[str, ...], moment: float | str, tmp_path: Path) -> None:
    seconds: list[float] = []
    while min(seconds, default=BOUND) >= BOUND and len(seconds) < _TRIES:
        seconds.append(_until_it_ended(words, moment, tmp_path / str(len(seconds))))
    assert min(seconds) < BOUND, seconds


@pytest.mark.parametrize("moment", [0.05, 0.3])
def test_ctrl_c_during_loading_shows_no_traceback(moment: float, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    starts = [sys.executable, "-c", f"import evener.__main__ as m; {_ARMED}m.main()", "nodes"]
    process = subprocess.Popen(starts, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()  # from now on the command is loaded
    time.sleep(moment)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    assert process.returncode in (2, *ENDED), errors


_ARMED = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); print('here', flush=True); "


def _until_it_ended(words: tuple[str, ...], moment: float | str, folder: Path) -> float:
    """Seconds from Ctrl-C, which the whole group in the foreground gets, to the end of the command."""
    folder.mkdir()
    with _started(words, folder) as (process, marker):
        _wait(process, folder / "said", moment)
        begin = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        code = process.wait(60)
        seconds = time.monotonic() - begin
        said = (folder / "said").read_text()
        assert code in ENDED, said
        assert "Traceback" not in said
        assert "evener: stopped" in said
        deadline = time.monotonic() + 20  # the server of processes ends when it has loaded what it was told to
        while processes_of(marker) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert processes_of(marker) == []
    return seconds


@contextmanager
def _started(words: tuple[str, ...], folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    name, value = "EVENER_TEST", str(uuid.uuid4())
    environment = {**os.environ, name: value, "PYTHONUNBUFFERED": "1"}
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(
            command(*words), cwd=folder, stdout=said, stderr=said, env=environment, start_new_session=True
        )
    try:
        yield process, f"{name}={value}"
    finally:
        for pid in processes_of(f"{name}={value}"):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], said: Path, moment: float | str) -> None:
    """Until so many seconds have passed, or a line of the command begins with this."""
    deadline = time.monotonic() + (moment if isinstance(moment, float) else 60)
    while time.monotonic() < deadline:
        assert process.poll() is None, said.read_text()
        if isinstance(moment, str) and any(line.startswith(moment) for line in said.read_text().splitlines()):
            return
        time.sleep(0.02)
    assert isinstance(moment, float), said.read_text()
