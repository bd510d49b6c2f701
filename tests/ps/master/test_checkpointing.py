"""What disks and clocks do to a master: a damaged snapshot, a full disk, a clock that is set; the run goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from evener.agreements.settings import AgreementSettings
from evener.agreements.snapshot import Snapshot, save_snapshot
from evener.ps.master import active_run, checkpointing
from evener.ps.protocol.config import StateDir
from evener.records.atomic import atomic_write
from evener.records.errors import InvalidInput
from support.agreements import SYNC, WAYS, distance
from support.linear_engine import BATCH, SAMPLES, job, serial, weights
from support.master_in_threads import Plane, plane, unpack, wait_until

EPOCHS, UPDATES = 60, SAMPLES // BATCH


class Running:
    """A run in the background."""

    def __init__(self, ps: Plane, agreement: AgreementSettings = SYNC) -> None:
        self._results: list[Any] = []
        self._errors: list[Exception] = []
        self._thread = threading.Thread(target=self._run, args=(ps, agreement))
        self._thread.start()

    def _run(self, ps: Plane, agreement: AgreementSettings) -> None:
        try:
            self._results.append(ps.watch(job(agreement, epochs=EPOCHS), weights())[0])
        except InvalidInput as error:
            self._errors.append(error)

    def result(self) -> Any:
        self._thread.join()
        assert not self._errors, self._errors
        return self._results[0]

    def error(self) -> Exception:
        self._thread.join()
        return self._errors[0]


@contextmanager
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Plane, Running]]:
    """A run whose master has ended, after some snapshots."""
    monkeypatch.setattr(checkpointing, "_MIN_INTERVAL_S", 0.02)
    with plane("a", "b", patience=5) as ps:
        for node in ps.nodes:
            node.mood.seconds = 0.1  # whatever the disk takes, the run is not over before
        running = Running(ps)
        wait_until(lambda: len(snapshots(ps)) == 2)
        ps.stop_master()
        for node in ps.nodes:
            node.mood.seconds = 0.0
        yield ps, running


def snapshots(ps: Plane) -> list[Path]:
    return sorted(ps.home.run.glob("server-*.safetensors"))


def flip(path: Path) -> None:
    content, random = bytearray(path.read_bytes()), Random(1)
    for _ in range(64):
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


HARMS: dict[str, Callable[[Path], Any]] = {
    "64 bits flipped": flip,
    "cut to half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("harm", HARMS)
def test_damaged_snapshot_is_set_aside_and_the_previous_one_used(harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with interrupted(monkeypatch) as (ps, running):
        newer = snapshots(ps)[-1]
        HARMS[harm](newer)
        ps.start_master()
        record, found = unpack(running.result())
        said = [sentence for sentence in ps.said if "warning" in sentence and "server" in sentence]
        assert len(said) == 1
        assert newer.name in said[0]
        assert "its files were moved to" in said[0]
        assert len(list(ps.home.aside.glob("*/checkpoint-*"))) == 1
    assert distance(found, serial(EPOCHS)) < 1e-12
    assert [event.kind for event in record.events].count("master restarted") == 1


@pytest.mark.parametrize("harm", ["64 bits flipped", "empty"])
def test_damaged_checkpoint_list_is_set_aside_too(harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with interrupted(monkeypatch) as (ps, running):
        HARMS[harm](max(ps.home.run.glob("checkpoint-*.msgpack")))
        ps.start_master()
        assert distance(unpack(running.result())[1], serial(EPOCHS)) < 1e-12


def test_master_without_a_valid_snapshot_reports_it_and_takes_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with interrupted(monkeypatch) as (ps, running):
        for path in ps.home.run.iterdir():
            path.write_bytes(b"?")
        ps.start_master()
        assert "there is no run linear-1" in str(running.error())
        assert any(
            "there is no complete checkpoint in" in sentence and "its files were moved to" in sentence
            for sentence in ps.said
        )
        ps.run(job(SYNC, run="linear-2"), weights())
        assert list(ps.home.run.iterdir()) == []


def test_last_two_snapshots_are_retained_until_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with interrupted(monkeypatch) as (ps, running):
        assert len(list(ps.home.run.iterdir())) == 4
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in ps.home.run.iterdir())
        ps.start_master()
        running.result()
        wait_until(lambda: not list(ps.home.run.iterdir()))
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in (ps.home.runs / "linear-1").iterdir())


def test_epoch_is_validated_with_its_own_weights_after_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpointing, "_MIN_INTERVAL_S", 0.02)
    with plane("a", "b", patience=5) as ps:
        ps.nodes[1].mood.validation_gate.clear()
        for node in ps.nodes:
            node.mood.seconds = 0.01
        running = Running(ps, WAYS["async"])
        wait_until(lambda: next((run.version for run in ps.ask().runs), 0) > 8 * UPDATES)
        ps.stop_master()
        ps.nodes[1].mood.validation_gate.set()
        ps.start_master()
        record, _ = unpack(running.result())
    assert [one.epoch for one in record.validations] == list(range(EPOCHS))
    first = record.validations[0]
    assert first.step < 4 * UPDATES  # when the epoch ended, not when the master went on
    assert first.loss > record.validations[1].loss


def test_full_disk_gives_one_warning_and_snapshots_resume_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing, "_MIN_INTERVAL_S", 0.02)
    is_full = threading.Event()

    def full(snapshot: Snapshot, path: Path) -> bytes:
        if is_full.is_set():
            raise OSError(28, "No space left on device")
        return save_snapshot(snapshot, path)

    monkeypatch.setattr(checkpointing, "save_snapshot", full)
    with plane("a", patience=5) as ps:
        ps.nodes[0].mood.seconds = 0.1
        running = Running(ps)
        wait_until(lambda: snapshots(ps))
        is_full.set()
        wait_until(
            lambda: any("cannot save a checkpoint of the run (No space left on device)" in said for said in ps.said)
        )
        kept, version = snapshots(ps), ps.version()
        wait_until(lambda: ps.version() > version + 3)
        assert snapshots(ps) == kept
        is_full.clear()
        wait_until(lambda: "checkpoints of the run are saved again" in ps.said)
        ps.nodes[0].mood.seconds = 0.0
        assert distance(unpack(running.result())[1], serial(EPOCHS)) < 1e-12
        assert sum("cannot save a checkpoint" in said for said in ps.said) == 1


def test_run_whose_folder_cannot_be_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with plane("a") as ps:
        monkeypatch.setattr(active_run, "open_log", full_disk)
        with pytest.raises(InvalidInput, match="No space left"):
            ps.run(job(SYNC), weights())
        assert not ps.ask().runs
        monkeypatch.undo()
        assert distance(ps.run(job(SYNC), weights())[1], serial(4)) < 1e-12


def test_run_whose_folder_cannot_be_made_is_set_aside_by_the_next_master(monkeypatch: pytest.MonkeyPatch) -> None:
    with interrupted(monkeypatch) as (ps, running):
        with monkeypatch.context() as patched:
            patched.setattr(active_run, "open_log", full_disk)
            ps.start_master()
            assert not ps.ask().runs
        assert isinstance(running.error(), InvalidInput)
        assert len(list(ps.home.aside.iterdir())) == 1


def test_run_that_cannot_be_moved_aside_is_given_up_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with interrupted(monkeypatch) as (ps, running):
        with monkeypatch.context() as patched:
            patched.setattr(active_run, "open_log", full_disk)
            patched.setattr(ps.home, "aside", ps.home.folder / "full" / "aside")
            (ps.home.folder / "full").write_text("no folder")
            ps.start_master()
            assert not ps.ask().runs
        assert isinstance(running.error(), InvalidInput)
        assert any("cannot be moved" in sentence for sentence in ps.said)
        assert distance(ps.run(job(SYNC), weights())[1], serial(4)) < 1e-12


def full_disk(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_results_that_cannot_be_written_still_reach_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with plane("a") as ps:
        with monkeypatch.context() as patch:
            patch.setattr(active_run, "save_result", full)
            _, found = ps.run(job(SYNC), weights())
        assert distance(found, serial(4)) < 1e-12
        wait_until(lambda: any("results cannot be written (No space left" in said for said in ps.said))
        ps.run(job(SYNC, run="linear-2"), weights())


@pytest.mark.parametrize("days", [-2, 2])
def test_clock_change_during_a_run_changes_no_duration(days: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    with plane("a") as ps:
        ps.nodes[0].mood.seconds = 0.002
        running = Running(ps)
        wait_until(lambda: ps.version() > 20)
        monkeypatch.setattr(time, "time", lambda: now() + days * 86_400)
        record, _ = unpack(running.result())
    assert 0 < record.seconds < 60
    assert 0 <= record.startup_seconds < 60


def test_master_removes_only_temporary_files_of_killed_masters(tmp_path: Path) -> None:
    home = StateDir(tmp_path / "home")
    drafts = [
        home.run / ".server-00000001.safetensors.123.456",
        home.run / ".tmpy1TBqj",
        home.folder / ".master.json.1.2",
    ]
    others = [home.run / "server-00000001.safetensors", home.folder / ".profile", home.runs / "r" / ".x.y.z"]
    for path in (*drafts, home.runs / "r" / ".model.safetensors.7.8", *others):
        atomic_write(path, b"1")
    (home.blobs / ".0123.abc").mkdir(parents=True)
    with home.occupied():
        assert not any(path.exists() for path in drafts)
        assert all(path.exists() for path in others)
        assert list(home.blobs.iterdir()) == []
        assert not (home.runs / "r" / ".model.safetensors.7.8").exists()
