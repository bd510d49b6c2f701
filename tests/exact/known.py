"""The known failures: what is not yet equal to one process, nor refused. The list may only shrink."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from exact.verdicts import Verdict

_LIST = Path(__file__).with_name("known_failures.txt")
_HEAD = "# way | recipe: what a run trains differently, or fails in; `python -m exact --known` writes this\n"
Case = tuple[str, str]
"""A way and a recipe."""


def cases_in(path: Path) -> list[Case]:
    """The cases that a file lists, one a line."""
    rows = [row.split(" | ", 1) for row in path.read_text().splitlines() if not row.startswith("#")]
    return [(way, recipe) for way, recipe in rows]


def known_failures(kind: str) -> list[Case]:
    """Those of a kind."""
    return [case for case in cases_in(_LIST) if case[1].startswith(f"{kind}/")]


def write_known(verdicts: Collection[Verdict]) -> None:
    """List what is bad among `verdicts`; what they are not about stays as it is."""
    judged = {(one.way, one.recipe) for one in verdicts}
    bad = {(one.way, one.recipe) for one in verdicts if not one.is_good}
    rows = sorted((set(cases_in(_LIST)) - judged) | bad, key=lambda case: case[::-1])
    _LIST.write_text(_HEAD + "".join(f"{way} | {recipe}\n" for way, recipe in rows))


def hold(verdicts: Iterable[Verdict], known: Collection[Case] = ()) -> None:
    """Nothing is bad but what is known to be, and that still is."""
    bad = {
        (one.way, one.recipe): f"{one.recipe} {one.way}: {one.verdict}: {one.symptom}"
        for one in verdicts
        if not one.is_good
    }
    new = [sentence for case, sentence in bad.items() if case not in known]
    assert not new, f"{len(new)} are not equal to one process:\n" + "\n".join(new)
    mended = [" | ".join(case) for case in known if case not in bad]
    assert not mended, f"{len(mended)} are mended, take them off the list:\n" + "\n".join(mended)
