"""Recipes on a master with uneven nodes: under `sync` equal to one process or refused; under all others they train."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable

import pytest

from exact.agreed import AGREEMENTS, judged
from exact.recipe import KINDS, recipes_of
from exact.verdicts import BY_CHECK, Verdict

pytestmark = pytest.mark.filterwarnings("ignore")  # of PyTorch, about what recipes use on purpose
_QUICK = 2
"""Recipes of a kind that are tried wherever tests run."""
_EQUAL_SHARE, _EQUAL_SHARE_ON_MASTER = 0.8, 0.6
"""Of all recipes, at least, under `sync`; and without those that ranks train; see docs/agreement.md."""
_NOT_KEPT = {"parametrised/embedding_with_max_norm"}
"""Evaluation changes its weights, and a master's nodes evaluate copies."""


def _names() -> list[str]:
    names = [f"{kind}/{name}" for kind in KINDS for name in recipes_of(kind)]
    return sorted(names, key=lambda name: zlib.crc32(name.encode()))


def _hold(verdicts: Iterable[Verdict]) -> Counter[str]:
    found = list(verdicts)
    wrong = [f"{one.verdict}: {one.recipe}: {one.symptom}" for one in found if one.verdict in _WRONG]
    assert not wrong, "\n".join(wrong)
    return Counter(one.verdict for one in found)


_WRONG = ("different", "traceback", "hang")


@pytest.mark.timeout(300)
def test_sync_recipes_equal_one_process_or_are_refused() -> None:
    chosen = [name for kind in KINDS for name in [n for n in _names() if n.startswith(f"{kind}/")][:_QUICK]]
    count = _hold(judged(chosen, "sync"))
    assert count["equal"] > len(chosen) / 3
    assert count[BY_CHECK] > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("with_ranks", "share"), [(False, _EQUAL_SHARE_ON_MASTER), (True, _EQUAL_SHARE)], ids=["master", "ranks"]
)
def test_every_sync_recipe_equals_one_process_or_is_refused(with_ranks: bool, share: float) -> None:
    names = _names()
    count = _hold(judged(names, "sync", with_ranks=with_ranks))
    assert count["equal"] >= share * len(names)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("agreement", [name for name in AGREEMENTS if name != "sync"])
def test_recipes_train_or_are_refused_by_name_without_sync(agreement: str) -> None:
    _hold(judged(_names()[::3], agreement))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("agreement", ["async", "average"])
def test_single_node_equals_one_process(agreement: str) -> None:
    names = [name for name in _names()[1::3] if name not in _NOT_KEPT]
    assert _hold(judged(names, agreement, num_nodes=1))["equal"] > len(names) / 2
