"""What a master writes down of its ranks: whole or not at all, on damaged and on full disks."""

from __future__ import annotations

from pathlib import Path

import pytest

from evener.ps.master.ranks.rank_journal import JournalState, RankJournal, Record, RunStart, StoredValue, roster_of
from evener.ps.protocol.config import StateDir
from evener.ps.protocol.rank_messages import RankJob
from support.full_disk import largest_file

BEGUN = RunStart(job=RankJob(run="r", task="tiny", title="tiny", config=b"{}"), secret=b"s" * 16)
ROSTER = roster_of({"a": 1, "b": 2}, (), 3, None)
PLAN = StoredValue(key="plan", value=b"half each")
WHOLE = JournalState(begun=BEGUN, values={"plan": b"half each"}, roster=ROSTER)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def home(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path)


def file_of(home: StateDir) -> Path:
    return home.run / "ranks-r.journal"


def write(home: StateDir, told: list[str], *records: Record) -> None:
    journal = RankJournal(home, "r", told.append)
    for record in records:
        journal.add(record)
    journal.close()


def load(home: StateDir, told: list[str]) -> JournalState | None:
    return RankJournal(home, "r", told.append).load()


@pytest.fixture
def written(home: StateDir, told: list[str]) -> bytes:
    """Three records, whole."""
    write(home, told, BEGUN, ROSTER, PLAN)
    return file_of(home).read_bytes()


def test_written_journal_loads_completely_and_is_private(home: StateDir, told: list[str], written: bytes) -> None:
    found = load(home, told)
    assert found == WHOLE
    assert file_of(home).stat().st_mode & 0o777 == 0o600
    assert told == []


def test_truncated_record_is_cut_off_and_writing_continues(home: StateDir, told: list[str], written: bytes) -> None:
    for length in range(len(written)):
        file_of(home).write_bytes(written[:length])
        before = load(home, told)
        write(home, told, StoredValue(key="later", value=b"l"))
        after = load(home, told)
        assert (after is None) == (before is None)
        if before is not None and after is not None:
            assert after.begun == BEGUN
            assert after.values == {**before.values, "later": b"l"}
    assert told[-1].startswith("warning: ")
    assert "are incomplete and were removed" in told[-1]


def test_damaged_byte_never_yields_wrong_records(home: StateDir, told: list[str], written: bytes) -> None:
    for place in range(len(written)):
        harmed = bytearray(written)
        harmed[place] ^= 0x41
        file_of(home).write_bytes(harmed)
        found = load(home, told)
        assert found is None or (found.begun, found.roster) == (BEGUN, ROSTER)
        assert found is None or found.values in ({}, {"plan": b"half each"})


def test_full_disk_deletes_the_journal_and_the_next_run_writes_again(
    home: StateDir, told: list[str], written: bytes
) -> None:
    journal = RankJournal(home, "r", told.append)
    with largest_file(len(written) + 20):
        journal.add(PLAN)
        journal.add(PLAN)
    assert told == ["warning: cannot save the run (No space left on device): a restarted master will not continue it"]
    assert load(home, told) is None
    for record in (BEGUN, ROSTER, PLAN):
        journal.add(record)
    journal.close()
    assert load(home, told) == WHOLE
    assert len(told) == 1


def test_journal_set_aside_is_not_loaded_again(home: StateDir, told: list[str], written: bytes) -> None:
    where = RankJournal(home, "r", told.append).set_aside()
    (kept,) = home.aside.glob("*/ranks-r.journal")
    assert str(kept.parent) in where
    assert kept.read_bytes() == written
    assert load(home, told) is None
    assert RankJournal(home, "r", told.append).set_aside() == "no files of it exist"
