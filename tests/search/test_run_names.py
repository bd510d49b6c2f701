"""Names of a study's runs survive the process and belong to one study."""

from __future__ import annotations

from pathlib import Path

from evener.search.master_runner import RunNames


def test_resumed_study_recognizes_its_run_names(tmp_path: Path) -> None:
    names, (own, other) = RunNames(tmp_path / "own"), (tmp_path / "own", tmp_path / "other")
    names.record(3, names.proposed(3))
    names.record(4, f"{names.proposed(4)}-2")
    again = RunNames(own)
    assert [again.of(number) for number in (3, 4, 5)] == [names.proposed(3), f"{names.proposed(4)}-2", None]
    assert [again.number_of(name) for name in (names.proposed(3), f"{names.proposed(4)}-2", "else")] == [3, 4, None]
    assert again.is_own(names.proposed(9))
    assert not RunNames(other).is_own(names.proposed(3))
