"""Programs as people publish them: on uneven nodes each trains what it trains alone, or is refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from programs.cells import cell_names
from programs.suite import WORLDS, in_world, off, perform, plain, source

QUICK: list[str] = []
"""One of several kinds, for every run of the tests."""
REFUSED: set[str] = set()
"""What cannot be trained on several nodes as it is written."""
TOLERANCE = 1e-10


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in cell_names()]
)
@pytest.mark.parametrize("world", [pytest.param("nodes 3:1", marks=pytest.mark.slow), "nodes 5:2:0"])
def test_a_published_program_equals_one_process_or_is_refused(name: str, world: str, tmp_path: Path) -> None:
    found = in_world(WORLDS[world], [name], tmp_path)[name]
    assert found.is_refused == (name in REFUSED), found.sentence
    if found.is_refused:
        assert len(found.sentence.splitlines()) == 1
    else:
        assert off(found, perform(plain(source(name)), name)) < TOLERANCE


def test_most_published_programs_are_trained() -> None:
    assert len(REFUSED) <= 0.3 * len(cell_names())
