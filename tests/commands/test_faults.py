"""A rank dies, stands still or fails, or the user stops the run: it is named, in time, and nothing is left running."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from support.commands import command, evener_here, processes_of

ENDLESS = str(Path(__file__).parents[1] / "support_tasks" / "endless.py")
PATIENCE = 4.0
"""Seconds after which a silent rank is lost, where this is awaited."""
LONG_PATIENCE = 60.0
"""For a run that shares the machine with other tests, and in which no rank is to be lost for its silence."""


@dataclass
class Running:
    """A run in progress."""

    process: subprocess.Popen[str]
    marker: str
    folder: Path
    lines: list[str] = field(default_factory=list)

    def ranks(self) -> list[int]:
        """Ids of the ranks' processes, in order of their nodes."""
        found = []
        for pid in processes_of(self.marker):
            if len(os.sched_getaffinity(pid)) < len(os.sched_getaffinity(0)):  # Evener pins its local nodes
                found.append(pid)
        return sorted(found)

    def wait_for_step(self, seconds: float = 60) -> None:
        """Return when the first steps are done."""
        self.wait_for(r"step [1-9]", seconds)

    def wait_for(self, pattern: str, seconds: float = 60) -> None:
        """Return when a line begins so."""
        deadline = time.monotonic() + seconds
        assert self.process.stdout is not None
        while time.monotonic() < deadline:
            line = self.process.stdout.readline()
            self.lines.append(line)
            if re.match(pattern, line):
                return
            assert line or self.process.poll() is None, "".join(self.lines)
        raise AssertionError("no step was made: " + "".join(self.lines))

    def finish(self, seconds: float) -> tuple[int, str]:
        """Exit code and stderr, at most `seconds` from now; nothing may be left running."""
        _, errors = self.process.communicate(timeout=seconds)
        deadline = time.monotonic() + 5
        while processes_of(self.marker) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert processes_of(self.marker) == []
        return self.process.returncode, errors


@contextmanager
def running(
    tmp_path: Path, *words: str, launcher: list[str] | None = None, patience: float = PATIENCE
) -> Iterator[Running]:
    """`evener train endless` on two nodes, past its first steps; killed on the way out if it still runs."""
    marker = f"EVENER_TEST={uuid.uuid4()}"
    words = ("train", ENDLESS, "--output", "run", "--patience", str(patience), *words)
    start = command(*words) if launcher is None else [*launcher, "-m", "evener", *words]
    name, value = marker.split("=")
    process = subprocess.Popen(
        start,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, name: value, "COLUMNS": "160", "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    run = Running(process=process, marker=marker, folder=tmp_path / "run")
    try:
        run.wait_for_step()
        yield run
    finally:
        for pid in processes_of(marker):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


TWO = ("--local-nodes", "1,1", "--shares", "2,1")
NEEDED = (*TWO, "--no-elastic")
"""Two nodes, both of which the run needs."""


@pytest.mark.alone
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="ranks are told by their core: needs two cores")
def test_killed_rank_ends_the_run_with_its_name(tmp_path: Path) -> None:
    with running(tmp_path, *NEEDED) as run:
        victim = run.ranks()[1]
        start = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        code, errors = run.finish(PATIENCE + 10)
        assert time.monotonic() - start < PATIENCE
    assert code == 4
    assert re.search(r"^evener: node node-\d \(rank \d\) was killed by signal 9 \(SIGKILL\) at step \d+$", errors, re.M)
    assert "Traceback" not in errors


@pytest.mark.alone
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="ranks are told by their core: needs two cores")
def test_frozen_rank_is_named_within_the_patience(tmp_path: Path) -> None:
    with running(tmp_path, *NEEDED) as run:
        victim = run.ranks()[0]
        start = time.monotonic()
        os.kill(victim, signal.SIGSTOP)
        code, errors = run.finish(PATIENCE + 15)
        assert time.monotonic() - start < PATIENCE + 4
    assert code == 4
    assert re.search(r"^evener: node node-\d \(rank \d\) has been silent for 4 s, at step \d+; node", errors, re.M)


@pytest.mark.alone
@pytest.mark.slow  # launch/test_processes.py has the quick one
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="ranks are told by their core: needs two cores")
def test_rank_ended_by_sigterm_is_lost(tmp_path: Path) -> None:
    with running(tmp_path, *NEEDED) as run:
        os.kill(run.ranks()[1], signal.SIGTERM)
        code, errors = run.finish(PATIENCE + 10)
    assert code == 4, errors
    assert "was killed by signal 15 (SIGTERM)" in read_noun(run.folder / "record.json", TrainRecord).ending


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="ranks are told by their core: needs two cores")
def test_killing_the_command_ends_a_frozen_rank(tmp_path: Path) -> None:
    with running(tmp_path, *TWO, patience=LONG_PATIENCE) as run:
        os.kill(run.ranks()[1], signal.SIGSTOP)
        os.kill(run.process.pid, signal.SIGKILL)
        code, _ = run.finish(10)
    assert code == -signal.SIGKILL


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_spare_node_continues_when_the_only_working_one_is_lost(tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path, "--local-nodes", "1,0.1") as run:
        while not list((run.folder / "checkpoints").glob("step-*")):
            time.sleep(0.1)
        working = run.ranks()
        assert len(working) == 1
        os.kill(working[0], number)
        run.wait_for(r"step \d+ +resumed: resumed after step \d+")
        run.wait_for_step()
        run.process.send_signal(signal.SIGINT)
        code, errors = run.finish(PATIENCE + 10)
    assert code == 130, errors
    record = read_noun(run.folder / "record.json", TrainRecord)
    lost = [event for event in record.events if event.kind == "node lost"]
    assert [len(event.nodes) for event in lost] == [1]
    assert record.plan.assignments[0].node not in lost[0].nodes
    assert "resumed" in [event.kind for event in record.events]


@pytest.mark.slow  # the quick one above freezes a rank, too
def test_killing_the_command_ends_its_ranks(tmp_path: Path) -> None:
    with running(tmp_path, *TWO, patience=LONG_PATIENCE) as run:
        os.kill(run.process.pid, signal.SIGKILL)
        code, _ = run.finish(10)
    assert code == -signal.SIGKILL


@pytest.mark.parametrize(
    "nodes", [pytest.param((), id="alone", marks=pytest.mark.slow), pytest.param(TWO, id="two nodes")]
)
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)], ids=["ctrl-c", "sigterm"]
)
def test_stopped_run_writes_a_checkpoint_and_ends(
    tmp_path: Path, nodes: tuple[str, ...], number: signal.Signals
) -> None:
    with running(tmp_path, *nodes, patience=LONG_PATIENCE) as run:
        if number == signal.SIGINT:
            os.killpg(run.process.pid, number)
        else:
            run.process.send_signal(number)
        code, errors = run.finish(PATIENCE + 10)
    assert code == 130, errors
    assert re.search(r"evener: stopped after step (\d+) as asked; go on with --resume --checkpoint run/check", errors)
    assert len(list((run.folder / "checkpoints").glob("step-*"))) >= 1
    assert "Traceback" not in errors
    record = read_noun(run.folder / "record.json", TrainRecord)
    assert re.match(r"stopped after step \d+ as asked", record.ending)
    assert record.steps[-1].step > 0


@pytest.mark.alone
@pytest.mark.slow  # torchrun waits half a minute for the rank that stands still
def test_frozen_torchrun_rank_is_named_by_the_others(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with running(tmp_path, "--shares", "2,1", launcher=launcher) as run:
        ranks = [p for p in processes_of(run.marker) if b"\0-m\0evener" in Path(f"/proc/{p}/cmdline").read_bytes()]
        ranks = [p for p in ranks if b"torch.distributed" not in Path(f"/proc/{p}/cmdline").read_bytes()]
        os.kill(max(ranks), signal.SIGSTOP)
        code, errors = run.finish(PATIENCE + 60)
    assert code != 0
    assert re.search(r"evener: node \S+ \(rank \d\) has been silent for 4 s, at step \d+; node \S+ waited", errors)
    record = read_noun(run.folder / "record.json", TrainRecord)
    assert "has been silent for 4 s" in record.ending
    assert record.steps


def test_error_in_user_code_names_file_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = tmp_path / "broken.py"
    task.write_text(
        "from torch import nn\n"
        "from tiny import data, model\n"
        "from evener import Task\n"
        "def loss(outputs, targets):\n"
        "    return nn.functional.cross_entropy(outputs[:, :1], targets.view(3, 3))\n"
        "task = Task(model=model, loss=loss, train_data=lambda: data(50, 1), batch_size=10)\n"
    )
    monkeypatch.syspath_prepend(str(Path(ENDLESS).parent))
    for nodes in ((), TWO):
        result = evener_here("train", "broken.py", *nodes, cwd=tmp_path)
        assert result.returncode == 3, result.stderr
        assert re.search(r"evener: RuntimeError: .*\(in loss, .*broken.py, line 5\b", " ".join(result.stderr.split()))
