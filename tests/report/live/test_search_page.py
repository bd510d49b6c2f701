"""A search on the live page: its folder is found, a page is sent how it stands whenever that is written anew."""

from __future__ import annotations

import os
from pathlib import Path

from evener.records.schema import write_noun
from evener.records.search_record import STUDY_FILE
from evener.report.live.feed import Cursor, Sources
from support.fake_search import fake_search


def test_search_is_sent_at_every_change_until_it_is_over(tmp_path: Path) -> None:
    file = tmp_path / "tune-digits" / STUDY_FILE
    write_noun(fake_search(trials=3, is_over=False), file)
    sources = Sources([tmp_path])
    source = sources.find("")
    assert source is not None
    assert sources.names() == ["tune-digits"]
    cursor = Cursor(source)
    source.poll()
    first = cursor.next(["tune-digits"])
    assert first is not None
    assert first.search == fake_search(trials=3, is_over=False)
    assert (first.picture.phase, first.picture.detail) == ("searching", "2 of 12 trials are over")
    assert not first.picture.is_over
    source.poll()
    assert cursor.next([]) is None
    write_noun(fake_search(trials=12), file)
    os.utime(file, ns=(1, 1))
    source.poll()
    last = cursor.next([])
    assert last is not None
    assert last.search is not None
    assert (len(last.search.trials), last.picture.is_over) == (12, True)


def test_unreadable_study_is_reported(tmp_path: Path) -> None:
    (tmp_path / STUDY_FILE).write_text("{")
    source = Sources([tmp_path]).find("")
    assert source is not None
    assert source.poll().picture().phase == "failed"
