"""Faults that cost nothing: nodes killed and stopped every second, a master killed again and again."""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from support.command_cluster import Cluster, cluster, wait_until
from support.fault_storm import Storm
from support.idle_task import SAMPLES, UPDATES_AN_EPOCH, write_pausing_task

pytestmark = pytest.mark.slow
NODES = ("one", "two", "three", "four")
PATIENCE = 2.0
FAULTS = 200
SLACK = 0.5
"""Seconds beyond the patience, for the master's tick and a machine that others use."""


@pytest.fixture
def ps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    with cluster("--patience", str(PATIENCE)) as one:
        for name in NODES:
            one.join(name, "--thin")
        one.wait_for_nodes()
        yield one
        one.down()


def words(task: str, epochs: int, pause: float, seed: int, output: str) -> list[str]:
    options = ["--option", f"pause={pause}", "--epochs", str(epochs), "--seed", str(seed), "--output", output]
    return [task, "--agreement", "sync", "--patience", str(PATIENCE), *options]


def undisturbed(ps: Cluster, task: str, epochs: int) -> list[float]:
    """Losses on the validation data of undisturbed runs from different first weights, the storm's first."""
    records = []
    for seed in range(4):
        ps.train(*words(task, epochs, 0.0, seed, f"calm-{seed}"))
        records.append(read_noun(ps.folder / f"calm-{seed}" / "record.json", TrainRecord))
    return [record.validations[-1].loss for record in records]


def is_within_noise(loss: float, calm: list[float]) -> bool:
    """Whether `loss` is no farther from the first of `calm` than these are from each other."""
    return abs(loss - calm[0]) <= max(calm) - min(calm)


def check_samples(record: TrainRecord, epochs: int) -> None:
    """Every sample of every epoch was learned from once, whoever was killed with it."""
    assert sum(step.samples for step in record.steps) == epochs * SAMPLES
    assert [v.epoch for v in record.validations] == list(range(epochs))


@pytest.mark.timeout(900)
def test_run_survives_200_killed_or_stopped_nodes(
    ps: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, epochs = write_pausing_task(tmp_path), 190
    calm = undisturbed(ps, task, epochs)
    training = ps.start_training(*words(task, epochs, 0.06, 0, "storm"))
    wait_until(lambda: ps.version() > 0, "that work begins")
    storm = Storm(ps, NODES, ["--thin"], PATIENCE, seed=7)
    storm.rage(FAULTS, lambda: training.poll() is None)
    assert training.returncode == 0, (ps.folder / "train.err").read_text()
    record = read_noun(ps.folder / "storm" / "record.json", TrainRecord)
    loss, longest = record.validations[-1].loss, max(step.seconds for step in record.steps)
    happened = Counter(event.kind for event in record.events)
    with capsys.disabled():
        sys.stdout.write(
            f"\n{dict(storm.done)} in {record.seconds:.0f} s; longest round {longest:.2f} s, patience {PATIENCE} s; "
            f"{dict(happened)}; validation loss {loss:.5f}, undisturbed {calm}\n"
        )
    assert record.every == 1  # else the seconds of several updates are added up
    assert longest <= PATIENCE + SLACK
    assert is_within_noise(loss, calm)
    check_samples(record, epochs)
    assert happened["excluded"] > 0
    assert happened["back"] + happened["replaced"] > FAULTS / 2


@pytest.mark.timeout(400)
def test_run_completes_despite_five_kills_of_the_master(
    ps: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, epochs = write_pausing_task(tmp_path), 40
    calm = undisturbed(ps, task, epochs)
    training = ps.start_training(*words(task, epochs, 0.06, 0, "killed"))
    random = Random(5)
    for kill in range(5):
        wait_until(lambda kill=kill: ps.version() > (kill + 1) * 3 * UPDATES_AN_EPOCH, "that the run goes on")  # type: ignore[misc]
        time.sleep(random.uniform(0.0, 1.0))  # at any moment
        ps.master.send_signal(signal.SIGKILL)
        ps.master.wait()
        ps.up()
    assert training.wait(120) == 0, (ps.folder / "train.err").read_text()
    record = read_noun(ps.folder / "killed" / "record.json", TrainRecord)
    loss = record.validations[-1].loss
    with capsys.disabled():
        sys.stdout.write(f"\nin {record.seconds:.0f} s: validation loss {loss:.5f}, undisturbed {calm}\n")
    assert Counter(event.kind for event in record.events)["master restarted"] == 5
    assert is_within_noise(loss, calm)
    check_samples(record, epochs)


def test_rounds_close_without_a_frozen_node_whose_updates_count_later(tmp_path: Path) -> None:
    task, epochs, frozen_seconds = write_pausing_task(tmp_path), 12, 4.0
    with cluster("--patience", "30") as ps:
        for name in NODES:
            ps.join(name, "--thin")
        ps.wait_for_nodes()
        typed = ("--agreement", "average", "--local-steps", "4", "--skip-late", "--option", "pause=0.1")
        training = ps.start_training(task, *typed, "--epochs", str(epochs), "--output", "late")
        wait_until(lambda: ps.version() > 0, "that work begins")
        ps.nodes["two"].send_signal(signal.SIGSTOP)
        time.sleep(frozen_seconds)
        ps.nodes["two"].send_signal(signal.SIGCONT)
        assert training.wait() == 0, ps.said("train.out")
        record = read_noun(ps.folder / "late" / "record.json", TrainRecord)
    skipped = [event.nodes for event in record.events if event.kind == "skipped"]
    assert ("two",) in skipped
    assert max(step.seconds for step in record.steps) < frozen_seconds / 2
    check_samples(record, epochs)
