"""A run goes on when a process of it is killed, with another in its place, and trains what one process trains."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from support.commands import TINY, command, evener_here
from support.struck_runs import WORDS, distance, ranks_of, run_with, wait_for_first_epoch


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """What one process trains."""
    result = evener_here(*WORDS, "--output", "alone", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    return tmp_path / "alone"


@pytest.mark.slow
@pytest.mark.alone
def test_run_with_a_killed_first_rank_equals_one_process(tmp_path: Path, alone: Path) -> None:
    record = run_with(tmp_path, signal.SIGKILL, "1,0.5", 0.03, "--patience", "20")
    assert distance(alone, tmp_path / "struck") < 1e-10
    lost = [event for event in record.events if event.kind == "node lost"]
    assert len(lost) == 1
    assert lost[0].message.startswith("node-0 was killed by signal 9 (SIGKILL); 1 node of 2 goes on with step ")
    assert 0 < record.goodput < 1
    assert sum(step.samples for step in record.steps) == 6 * 200
    assert len(record.validations) == 6


def test_run_without_elasticity_gives_its_reason(tmp_path: Path) -> None:
    result = evener_here("train", TINY, "--epochs", "1", "--elastic", "--output", "run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    said = " ".join(result.stdout.split())
    assert "not elastic: a lost node ends this run: nodes are replaced only where this command starts several" in said


@pytest.mark.alone
@pytest.mark.slow  # a frozen rank is given up after the patience
def test_run_with_a_frozen_first_rank_equals_one_process(tmp_path: Path, alone: Path) -> None:
    record = run_with(tmp_path, signal.SIGSTOP, "1,0.5,0.5", 0.05, "--patience", "5", wakes_after=8.0)
    assert distance(alone, tmp_path / "struck") < 1e-10
    kinds = [event.kind for event in record.events if event.kind in ("node lost", "joined")]
    assert kinds[0] == "node lost"
    silent = next(event for event in record.events if event.kind == "node lost")
    assert silent.message.startswith("node-0 has been silent for 5 s, at step ")
    assert sum(step.samples for step in record.steps) == 6 * 200


@pytest.mark.alone
@pytest.mark.slow  # it is frozen for longer than the patience
@pytest.mark.timeout(300)
def test_frozen_last_holder_of_the_state_is_awaited(tmp_path: Path, alone: Path) -> None:
    words = (*WORDS, "--local-nodes", "1,0.5", "--shares", "1,0.5", "--patience", "5", "--output", "struck")
    process = subprocess.Popen(
        command(*words, "--option", "pause=0.05"), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    wait_for_first_epoch(tmp_path, process, 150)
    last, other = ranks_of(process.pid)
    last.suspend()
    other.kill()
    time.sleep(9.0)
    assert process.poll() is None
    last.resume()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert distance(alone, tmp_path / "struck") < 1e-10
    record = read_noun(tmp_path / "struck" / "record.json", TrainRecord)
    assert sum(step.samples for step in record.steps) == 6 * 200
    told = (tmp_path / "struck" / "events.jsonl").read_text()
    assert '"kind":"waiting"' in told
    assert '"kind":"heard again"' in told


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killing_the_command_ends_its_ranks_and_the_run_resumes(tmp_path: Path, alone: Path) -> None:
    words = (*WORDS, "--local-nodes", "1,0.5", "--shares", "1,0.5", "--patience", "20", "--output", "struck")
    process = subprocess.Popen(
        command(*words, "--option", "pause=0.05"), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for_first_epoch(tmp_path, process, 150)
    ranks = ranks_of(process.pid)
    process.kill()
    process.wait()
    assert len(ranks) == 2
    assert psutil.wait_procs(ranks, timeout=20)[1] == []
    result = evener_here(*words, "--resume", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert distance(alone, tmp_path / "struck") < 1e-10


@pytest.mark.alone
@pytest.mark.slow
def test_run_without_remaining_nodes_gives_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no remaining node holds the state of the training"):
        run_with(tmp_path, signal.SIGKILL, "1,0.5", 0.05, "--patience", "20", victims=2)


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "words", [("data+filter", "--replicas", "2,1"), ("pipeline", "--micro-batches", "1")], ids=lambda words: words[0]
)
def test_elastic_sharded_run_with_a_killed_rank_equals_one_process(
    tmp_path: Path, alone: Path, words: tuple[str, ...]
) -> None:
    more = ("--patience", "20", "--elastic", "--strategy", *words)
    record = run_with(tmp_path, signal.SIGKILL, "1,0.5,0.5", 0.05, *more, start_seconds=150)  # it is rehearsed, too
    assert distance(alone, tmp_path / "struck") < 1e-10
    lost = [event.message for event in record.events if event.kind == "node lost"]
    assert len(lost) == 1
    assert lost[0].startswith("node-0 was killed by signal 9 (SIGKILL); 2 nodes of 3 go on with step ")
    assert lost[0].endswith("again") == (record.plan.copy_steps > 0)
    assert sum(step.samples for step in record.steps) == 6 * 200


@pytest.mark.alone
@pytest.mark.slow
def test_replacement_of_a_slowed_node_is_as_slow(tmp_path: Path) -> None:
    more = ("--epochs", "20", "--shares", "1,1")
    record = run_with(tmp_path, signal.SIGKILL, "0.25,1", 0.02, *more, "--strategy", "data")  # a pause is no work
    came = next(event.step for event in record.events if event.kind == "caught up")
    lost = next(event.step for event in record.events if event.kind == "node lost")
    own = [(step.step, step.nodes[0].compute_seconds) for step in record.steps if step.nodes[0].samples]
    before = sorted(seconds for number, seconds in own if 2 < number < lost)
    after = sorted(seconds for number, seconds in own if number > came + 4)
    assert after[len(after) // 2] > 0.7 * before[len(before) // 2] > 0.05


@pytest.mark.alone
@pytest.mark.slow
def test_sharded_run_ends_with_a_lost_node_by_default(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"evener: node node-\d \(rank \d\) was killed by signal 9"):
        run_with(tmp_path, signal.SIGKILL, "1,1", 0.05, "--patience", "20", "--strategy", "filter")
