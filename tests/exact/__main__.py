"""Prints the verdicts of all recipes: `PYTHONPATH=tests python -m exact [KIND | KIND/NAME] ... [--ways data]`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from exact.divisions import WAYS
from exact.known import write_known
from exact.recipe import KINDS, recipes_of
from exact.verdicts import BY_CHECK, IllegalRecipe, Verdict, judge, table
from exact.worlds import Worlds, worlds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*", default=list(KINDS))
    parser.add_argument("--ways", default="")
    parser.add_argument("--limit", type=float, default=40.0)
    parser.add_argument("--no-check", action="store_true", help="See what is underneath the self-check.")
    parser.add_argument("--beneath", action="store_true", help="Also run what the self-check refused.")
    parser.add_argument("--save", type=Path, help="Verdicts as JSON; those of other recipes that it holds are kept.")
    parser.add_argument(
        "--known",
        action="store_true",
        help="Bring the list of known failures up to date.",
    )
    asked = parser.parse_args()
    ways = [way for way in WAYS if way.startswith(tuple(asked.ways.split(",")))]
    names = [one for what in asked.what for one in ([what] if "/" in what else _of_kind(what))]
    found: list[Verdict] = []
    begin = time.perf_counter()
    with worlds(asked.limit) as made:
        for name in names:
            own = _verdicts(made, name, ways, is_checked=not asked.no_check)
            found += own
            for one in [one for one in own if one.verdict != "equal"]:
                beneath = _beneath(made, one) if asked.beneath and one.verdict == BY_CHECK else ""
                sys.stdout.write(f"{one.verdict:20} {one.recipe:40} {one.way:14} {beneath}{one.symptom}\n")
                sys.stdout.flush()
            if asked.save is not None:
                _save(asked.save, own)  # at once: it takes long, and may be ended
    if asked.known:
        write_known(found)
    sys.stdout.write(f"\n{table(found)}\n\n{len(found)} checks in {time.perf_counter() - begin:.0f} s\n")


def _of_kind(kind: str) -> list[str]:
    return [f"{kind}/{name}" for name in recipes_of(kind)]


def _verdicts(made: Worlds, name: str, ways: list[str], is_checked: bool) -> list[Verdict]:
    try:
        return judge(made, name, ways, is_checked)
    except IllegalRecipe as error:
        sys.stdout.write(f"ILLEGAL {error}\n")
        return []


def _beneath(made: Worlds, refused: Verdict) -> str:
    """What a run without the self-check would have been: if equal, the alarm was a false one."""
    (one,) = judge(made, refused.recipe, [refused.way], is_checked=False)
    return f"[beneath: {one.verdict}] "


def _save(path: Path, found: list[Verdict]) -> None:
    known = json.loads(path.read_text()) if path.exists() else []
    new = {(one.recipe, one.way) for one in found}
    kept = [Verdict(**one) for one in known if (one["recipe"], one["way"]) not in new]
    path.write_text(json.dumps([vars(one) for one in kept + found], indent=0))


if __name__ == "__main__":
    main()
