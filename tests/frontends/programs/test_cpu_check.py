"""A check on CPUs that cannot begin leaves nothing behind."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from evener.frontends.programs.cpu_check import CpuCheck, shares_of_check
from evener.records.errors import InvalidInput


def test_check_that_cannot_begin_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    used: list[Path] = []

    def command(folder: Path) -> list[str]:
        used.append(folder)
        raise InvalidInput("the task cannot be pickled")

    with pytest.raises(InvalidInput):
        CpuCheck(command)
    assert used[0].parent == tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("shares", "size", "expected"),
    [("measured", 2, "measured"), ("5,2,1", 2, "5,2"), ("0,0,1", 2, "equal"), ("2,1", 2, "2,1")],
)
def test_shares_of_the_first_ranks_are_kept_unless_they_are_zero(shares: str, size: int, expected: str) -> None:
    assert shares_of_check(shares, size) == expected
