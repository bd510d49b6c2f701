"""Looks for the next difference: `PYTHONPATH=tests python -m exact.seek FIRST COUNT`; prints the simplest finds.

What it finds belongs into finds.txt, in the form in which it is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from random import Random

from exact.divisions import WAYS
from exact.drawn import draw, name_of, shrink
from exact.verdicts import IllegalRecipe, Verdict, judge
from exact.worlds import Worlds, worlds


def check(made: Worlds, seed: int, ways: int, is_checked: bool = True) -> list[Verdict]:
    """The verdicts of the recipe that a seed draws, under some ways that it draws, too; none if it is not legal.

    Whatever equals one process without the self-check of a run equals it with it, in half the time; the rest is held
    again with it, unless `is_checked` is false.
    """
    try:
        found = judge(made, draw(seed), Random(seed).sample(list(WAYS), ways), is_checked=False)
        again = [one.way for one in found if is_checked and not one.is_good]
        return [one for one in found if one.way not in again] + (judge(made, draw(seed), again) if again else [])
    except IllegalRecipe:
        return []


def shrunk(made: Worlds, found: Verdict, is_checked: bool = True) -> Verdict:
    """The same kind of verdict, of the simplest recipe."""
    best = [found]

    def fails(description: dict[str, object]) -> bool:
        try:
            (verdict,) = judge(made, name_of(description), [found.way], is_checked)
        except IllegalRecipe:
            return False
        if verdict.verdict == found.verdict:
            best.append(verdict)
        return verdict.verdict == found.verdict

    shrink(json.loads(found.recipe.partition("/")[2]), fails)
    return best[-1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--ways", type=int, default=3)
    parser.add_argument("--limit", type=float, default=40.0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--no-check", action="store_true", help="See what is underneath the self-check.")
    asked = parser.parse_args()
    counts: Counter[str] = Counter()
    end = time.monotonic() + asked.seconds
    with worlds(asked.limit) as made:
        for seed in range(asked.first, asked.first + asked.count):
            for one in check(made, seed, asked.ways, not asked.no_check):
                counts[one.verdict] += 1
                if not one.is_good:
                    least = shrunk(made, one, not asked.no_check)
                    sys.stdout.write(f"{seed}: {least.verdict}: {least.symptom}\n{least.way} | {least.recipe}\n")
                    sys.stdout.flush()
            if seed % 500 == 499:
                sys.stdout.write(f"until {seed}: {counts.total()} checks: {dict(counts)}\n")
                sys.stdout.flush()
            if time.monotonic() > end:
                break
    sys.stdout.write(f"{counts.total()} checks: {dict(counts)}\n")


if __name__ == "__main__":
    main()
