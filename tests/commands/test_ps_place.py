"""What the place does to a run, with the commands as typed: small disks, damaged files, clocks that are set."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import pytest

from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from support.command_cluster import Cluster, cluster, wait_until
from support.idle_task import SAMPLES, write_pausing_task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
WALL_CLOCK = Path(__file__).parents[1] / "support" / "told_wall_clock.c"
EPOCHS = 40
TWO_DAYS = 2 * 86_400


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")


@contextmanager
def training(ps: Cluster, folder: Path, *words: str, epochs: int = EPOCHS) -> Iterator[Path]:
    """A run of two nodes that has begun; after the block it is awaited, and its record lies in the path given."""
    for name in ("one", "two"):
        ps.join(name, "--thin")
    ps.wait_for_nodes()
    task, output = write_pausing_task(folder), ps.folder / "out"
    options = ["--agreement", "sync", "--epochs", str(epochs), "--output", str(output), *words]
    command = ps.start_training(task, *options)
    wait_until(lambda: ps.version() > 0, "that work begins")
    yield output / "record.json"
    assert command.wait(200) == 0, (ps.folder / "train.err").read_text()
    record = read_noun(output / "record.json", TrainRecord)
    assert sum(step.samples for step in record.steps) == epochs * SAMPLES
    assert [v.epoch for v in record.validations] == list(range(epochs))


def undisturbed(ps: Cluster, folder: Path, *words: str, epochs: int = EPOCHS) -> float:
    """The loss on the validation data of the same run when nothing happens; once that other run is over."""
    options = ["--agreement", "sync", "--epochs", str(epochs), "--output", "calm", *words]
    ps.train(write_pausing_task(folder), *options)
    return loss_of(ps.folder / "calm" / "record.json")


def loss_of(path: Path) -> float:
    return read_noun(path, TrainRecord).validations[-1].loss


def snapshots(ps: Cluster) -> list[Path]:
    return sorted((ps.home / "run").glob("server-*.safetensors"))


def complete_snapshots(ps: Cluster) -> list[Path]:
    """Those that the master goes on from: the file that belongs to each is written after it."""
    numbers = [path.stem.rpartition("-")[2] for path in (ps.home / "run").glob("checkpoint-*.msgpack")]
    return [path for path in snapshots(ps) if path.stem.rpartition("-")[2] in numbers]


def said(ps: Cluster, sentence: str) -> bool:
    return sentence in ps.said("up")


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A disk of this size; skips the test where none can be made."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "evener-test", str(folder)]
    if shutil.which("mount") is None or subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("making a small disk needs root and the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """The file that takes all the room there is."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        while free > 0:
            file.write(bytes(free))
            free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    return ballast


def test_full_disk_gives_a_warning_and_snapshots_resume(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 8 << 20) as disk, cluster(home=disk / "home") as ps:
        with training(ps, tmp_path, "--option", "pause=0.05") as record:
            wait_until(lambda: len(snapshots(ps)) == 2, "that snapshots are written")
            ballast = fill(disk)
            wait_until(lambda: said(ps, "cannot save a checkpoint of the run (No space left on device)"), "a warning")
            version = ps.version()
            wait_until(lambda: ps.version() > version + 5, "that the run goes on")
            kept = snapshots(ps)
            assert kept
            ballast.unlink()
            wait_until(lambda: said(ps, "checkpoints of the run are saved again"), "that snapshots go on")
            wait_until(lambda: snapshots(ps)[-1] > kept[-1], "a newer snapshot")
        assert ps.master.poll() is None
        assert loss_of(record) == pytest.approx(undisturbed(ps, tmp_path), rel=1e-3)
        ps.down()


def flip(path: Path) -> None:
    content, random = bytearray(path.read_bytes()), Random(1)
    for _ in range(64):
        content[random.randrange(len(content))] ^= 0xFF
    path.write_bytes(content)


HARMS: dict[str, Callable[[Path], Any]] = {
    "64 bytes flipped": flip,
    "cut to half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("harm", HARMS)
def test_run_resumes_from_the_snapshot_before_a_damaged_one(harm: str, tmp_path: Path) -> None:
    with cluster() as ps:
        with training(ps, tmp_path, "--option", "pause=0.05", epochs=20) as record:
            wait_until(lambda: len(complete_snapshots(ps)) == 2, "that snapshots are written")
            ps.master.send_signal(signal.SIGKILL)
            ps.master.wait()
            newest = complete_snapshots(ps)[-1]
            HARMS[harm](newest)
            ps.up()
            wait_until(lambda: said(ps, "its files were moved to"), "a warning")
            assert said(ps, newest.name)
            assert len(list((ps.home / "aside").glob("*/checkpoint-*"))) == 1
        assert loss_of(record) == pytest.approx(undisturbed(ps, tmp_path, epochs=20), rel=0.02)
        ps.down()


def test_master_killed_20_times_leaves_no_temporary_files(tmp_path: Path) -> None:
    left = 0
    with cluster() as ps:
        wide = ("--option", "width=200000")  # 9 MB
        with training(ps, tmp_path, *wide, "--option", "pause=0.05", epochs=25):
            for _ in range(20):
                wait_for_a_draft(ps.home / "run")
                ps.master.send_signal(signal.SIGKILL)
                ps.master.wait()
                left += len(drafts(ps.home))
                ps.up()
                assert len(drafts(ps.home)) <= 1  # its own
        wait_until(lambda: not snapshots(ps), "that the run is forgotten")
        assert list((ps.home / "run").iterdir()) == []
        ps.down()
    assert left >= 10  # else nothing was tried


def wait_for_a_draft(folder: Path) -> None:
    """Look without pause: writing takes some milliseconds, every two seconds."""
    until = time.monotonic() + 10
    while not drafts(folder) and time.monotonic() < until:
        pass


def drafts(folder: Path) -> list[Path]:
    return [path for path in folder.rglob(".server-*") if path.is_file()]


@pytest.fixture
def told_wall_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says how many seconds off the wall clock is of processes that are started now."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("setting a process's clock needs a C compiler")
    library, file = tmp_path / "told_wall_clock.so", tmp_path / "seconds"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(WALL_CLOCK)], check=True)
    file.write_text("0")
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("TOLD_WALL_CLOCK", str(file))
    return file


@pytest.mark.parametrize("seconds", [-TWO_DAYS, TWO_DAYS])
def test_clock_change_of_the_master_changes_no_duration(
    seconds: int, told_wall_clock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster() as ps:
        monkeypatch.delenv("LD_PRELOAD")
        began = time.monotonic()
        with training(ps, tmp_path, "--option", "pause=0.05", epochs=10) as path:
            told_wall_clock.write_text(str(seconds))
        passed = time.monotonic() - began
        record = read_noun(path, TrainRecord)
        ps.train(write_pausing_task(tmp_path), "--agreement", "sync", "--epochs", "1", "--output", "next")
        line = json.loads((ps.home / "audit.jsonl").read_text().splitlines()[-1])  # that it was submitted
        shown = (datetime.fromisoformat(line["time"]) - datetime.now(UTC)).total_seconds()
        ps.down()
    assert abs(shown - seconds) < 300  # the clock was set
    assert 0 < record.seconds < passed
    assert 0 <= record.startup_seconds < passed
    assert all(0 <= step.seconds < passed for step in record.steps)
