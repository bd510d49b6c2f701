"""`study.json` is written when the search has changed, at most once a second, and at the end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from evener.records.schema import read_noun
from evener.records.search_record import STUDY_FILE, SearchRecord
from evener.search.command import StudyFile
from evener.search.options import TuneConfig
from evener.search.trials import SearchTrial


def test_study_file_is_written_on_change_once_a_second_and_at_the_end(tmp_path: Path) -> None:
    now = [10.0]
    first = SearchTrial(0, {"lr": "0.1"}, nodes=["ada"])
    search: Any = SimpleNamespace(trials={0: first}, best=None, running=frozenset({0}))
    path = tmp_path / STUDY_FILE
    file = StudyFile(tmp_path, TuneConfig(task="digits", trials=5), "accuracy", 9, clock=lambda: now[0])
    file.show(search)
    found = read_noun(path, SearchRecord)
    assert (found.is_over, found.wanted, found.trials[0].is_running) == (False, 5, True)
    first.scores[1] = 0.5
    file.show(search)
    assert read_noun(path, SearchRecord) == found
    now[0] += 1.0
    file.show(search)
    assert read_noun(path, SearchRecord).trials[0].scores == {1: 0.5}
    before = path.stat().st_mtime_ns
    now[0] += 1.0
    file.show(search)
    assert path.stat().st_mtime_ns == before
    first.outcome = "complete"
    search.best = first
    record = file.conclude(search, {"lr": 1.0})
    assert read_noun(path, SearchRecord) == record
    assert (record.is_over, record.best, record.seconds, record.trials[0].is_running) == (True, 0, 2.0, False)
