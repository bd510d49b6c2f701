"""Every recipe, divided in every way, gives what one process gives, or is refused in one sentence before step 1."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from itertools import cycle

import pytest

from exact.divisions import WAYS
from exact.known import hold, known_failures
from exact.recipe import KINDS, recipes_of
from exact.verdicts import Verdict, judge
from exact.worlds import worlds

_QUICK = 2
"""Recipes of a kind that are tried in a single way wherever tests run."""


def _verdicts(cases: Iterable[tuple[str, list[str]]]) -> Iterator[Verdict]:
    with worlds() as made:
        for name, ways in cases:
            yield from judge(made, name, ways)


def _quick() -> Iterator[tuple[str, list[str]]]:
    """Some recipes of every kind, and every way as often as any other."""
    ways = cycle(WAYS)
    for kind in KINDS:
        names = sorted(recipes_of(kind), key=lambda name: zlib.crc32(name.encode()))
        for name, way in zip(names[:_QUICK], ways, strict=False):
            if (way, f"{kind}/{name}") not in known_failures(kind):
                yield f"{kind}/{name}", [way]


@pytest.mark.timeout(300)
def test_recipes_are_equal_or_refused_in_one_way_each() -> None:
    hold(_verdicts(_quick()))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_recipes_are_equal_or_refused_in_every_way(kind: str) -> None:
    hold(_verdicts((f"{kind}/{name}", list(WAYS)) for name in recipes_of(kind)), known_failures(kind))
