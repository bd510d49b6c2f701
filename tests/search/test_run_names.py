"""Names of a study's runs at a master outlive the process that chose them, and are no other study's."""

from __future__ import annotations

from pathlib import Path

from evener.search.run_names import RunNames


def test_names_are_known_to_the_next_process_of_the_study_and_to_no_other(tmp_path: Path) -> None:
    names, (own, other) = RunNames(tmp_path / "own"), (tmp_path / "own", tmp_path / "other")
    names.note(3, names.wanted(3))
    names.note(4, f"{names.wanted(4)}-2")
    again = RunNames(own)
    assert [again.of(number) for number in (3, 4, 5)] == [names.wanted(3), f"{names.wanted(4)}-2", None]
    assert [again.number_of(name) for name in (names.wanted(3), f"{names.wanted(4)}-2", "else")] == [3, 4, None]
    assert again.is_own(names.wanted(9))
    assert not RunNames(other).is_own(names.wanted(3))
