"""Every recipe, divided in every way, gives what one process gives, or is refused in one sentence before step 1."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import pytest

from exact.divisions import WAYS
from exact.known import hold, known_failures
from exact.recipe import KINDS, recipes_of
from exact.verdicts import Verdict, judge
from exact.worlds import worlds

_QUICK = 6
"""One of so many recipes is tried in a single way wherever tests run."""


def _verdicts(cases: Iterable[tuple[str, list[str]]]) -> Iterator[Verdict]:
    with worlds() as made:
        for name, ways in cases:
            yield from judge(made, name, ways)


def _quick() -> Iterator[tuple[str, list[str]]]:
    for kind in KINDS:
        for name in recipes_of(kind):
            number = zlib.crc32(name.encode())
            way = list(WAYS)[number // _QUICK % len(WAYS)]
            if number % _QUICK == 0 and (way, f"{kind}/{name}") not in known_failures(kind):
                yield f"{kind}/{name}", [way]


@pytest.mark.timeout(300)
def test_equal_or_refused_in_one_way_each() -> None:
    hold(_verdicts(_quick()))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_equal_or_refused_in_every_way(kind: str) -> None:
    hold(_verdicts((f"{kind}/{name}", list(WAYS)) for name in recipes_of(kind)), known_failures(kind))
