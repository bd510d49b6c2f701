"""A terminal that closes ends a run as SIGTERM does; signals that a run was started to ignore never end it."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from support.commands import TINY, command, processes_of

TRAIN = ("train", TINY, "--option", "pause=0.02", "--epochs", "10000", "--output", "run")
TWO = ("--local-nodes", "1,1")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "evener"]
PROGRAM = """\
import torch
import evener

run = evener.join()
model = torch.nn.Linear(4, 2)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=8)
model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
for _ in range(100_000):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        print("a line of the program", flush=True)
"""


class Started:
    """A run that somebody else started, in a session of its own."""

    def __init__(self, process: subprocess.Popen[bytes], marker: str, folder: Path) -> None:
        self.process, self._marker, self.folder = process, marker, folder

    def num_events(self) -> int:
        """How often it has written down what steps came to."""
        return sum(file.read_bytes().count(b'"Step"') for file in (self.folder / "run").glob("events*"))

    def wait_for_steps(self) -> None:
        """Return when more steps are done than now."""
        before, deadline = self.num_events(), time.monotonic() + 90
        while self.num_events() <= before + 1:
            assert self.process.poll() is None, self.errors()
            assert time.monotonic() < deadline, self.errors()
            time.sleep(0.05)

    def errors(self) -> str:
        """What it wrote to stderr."""
        return (self.folder / "errors").read_text()

    def finish(self) -> int:
        """Its exit code; nothing may be left running."""
        code, deadline = self.process.wait(60), time.monotonic() + 5
        while processes_of(self._marker) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert processes_of(self._marker) == []
        return code


@contextmanager
def started(
    words: Sequence[str], folder: Path, stdout: int, before: Callable[[], object] = lambda: None
) -> Iterator[Started]:
    name, value = "EVENER_TEST", str(uuid.uuid4())
    environment = {**os.environ, name: value, "PYTHONUNBUFFERED": "1"}
    with (folder / "errors").open("wb") as errors:
        process = subprocess.Popen(
            words, cwd=folder, stdin=stdout, stdout=stdout, stderr=errors, env=environment, start_new_session=True,
            preexec_fn=before,
        )  # fmt: skip
    try:
        yield Started(process, f"{name}={value}", folder)
    finally:
        for pid in processes_of(f"{name}={value}"):
            os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(command(*TRAIN), id="this process"),
        pytest.param(command(*TRAIN, *TWO), id="local nodes", marks=pytest.mark.slow),
        pytest.param([*TORCHRUN, *TRAIN], id="torchrun", marks=pytest.mark.slow),
        pytest.param(command(*TRAIN, *TWO, "--agreement", "average"), id="agreement", marks=pytest.mark.slow),
    ],
)
def test_run_saves_its_results_if_its_terminal_closes(words: Sequence[str], tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    with started(words, tmp_path, theirs, partial(fcntl.ioctl, theirs, termios.TIOCSCTTY, 0)) as run:
        os.close(theirs)
        run.wait_for_steps()
        os.close(ours)
        code = run.finish()
    assert code == (130 if "--standalone" not in words else 1), run.errors()  # torchrun's own code of a signal
    assert "Traceback" not in run.errors() or "--standalone" in words, run.errors()
    assert read_noun(tmp_path / "run" / "record.json", TrainRecord).steps
    if "--agreement" not in words:
        assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_printing_program_finishes_its_step_if_its_terminal_closes(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ours, theirs = os.openpty()
    words = command("run", "--run-folder", "run", *TWO, "program.py")
    with started(words, tmp_path, theirs, partial(fcntl.ioctl, theirs, termios.TIOCSCTTY, 0)) as run:
        os.close(theirs)
        os.set_blocking(ours, False)
        deadline = time.monotonic() + 90
        while run.num_events() < 2:
            assert run.process.poll() is None, run.errors()
            assert time.monotonic() < deadline, run.errors()
            try:
                os.read(ours, 1 << 16)
            except BlockingIOError:
                time.sleep(0.02)
        os.close(ours)
        code = run.finish()
    assert code == 130, run.errors()
    assert read_noun(tmp_path / "run" / "record.json", TrainRecord).steps


@pytest.mark.parametrize(
    ("number", "nodes"),
    [
        pytest.param(signal.SIGINT, (), id="ctrl-c, this process"),
        pytest.param(signal.SIGINT, TWO, id="ctrl-c, local nodes", marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, (), id="hang-up, this process", marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, TWO, id="hang-up, local nodes", marks=pytest.mark.slow),
    ],
)
def test_signal_ignored_at_the_start_never_ends_a_run(
    number: signal.Signals, nodes: tuple[str, ...], tmp_path: Path
) -> None:
    words, ignored = command(*TRAIN, *nodes), partial(signal.signal, number, signal.SIG_IGN)
    with started(words, tmp_path, subprocess.DEVNULL, ignored) as run:
        run.wait_for_steps()
        os.killpg(run.process.pid, number)
        run.wait_for_steps()
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 130, run.errors()


def test_master_stops_cleanly_if_its_terminal_closes(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    words = command("up", "--home", "home", "--insecure", "--listen", "127.0.0.1:0")
    with started(words, tmp_path, theirs, partial(fcntl.ioctl, theirs, termios.TIOCSCTTY, 0)) as master:
        os.close(theirs)
        deadline = time.monotonic() + 60
        while not (tmp_path / "home" / "master.json").exists():
            assert time.monotonic() < deadline, master.errors()
            time.sleep(0.02)
        os.close(ours)
        assert master.finish() in (0, 130)
    assert "the master stops" in master.errors()
