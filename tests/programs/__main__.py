"""Runs all programs in all worlds and prints the table; `--write docs/lab/equality.md` puts it into the page.

It takes many minutes. With `--keep FOLDER --seconds 150` it ends after so long, keeps in FOLDER what it has found, and
goes on from there the next time; take a new folder for another state of the code.
"""

from __future__ import annotations

import argparse
import ast
import math
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from programs.plain_ddp import DIFFER, under_ddp
from programs.suite import WORLDS, Outcome, changed_lines, in_world, names, off, outcome_in, perform, plain, source

BEGIN, END = "<!-- programs: made by python -m programs -->", "<!-- end of programs -->"
TOGETHER = 8
"""Programs that one start of the nodes performs."""
PLAIN = "plain DDP"
LACKING = ("_as_it_was", "_as_they_were")
"""Ends of the names of programs that are others, without the words that say what their loss is."""


def verdict(found: Outcome, expected: Outcome) -> str:
    """A cell of the table."""
    if found.sentence:
        return "refused" if found.is_refused else "FAILED"
    return f"{off(found, expected):.0e}"


def find(folder: Path, until: float) -> bool:
    """Perform what `folder` does not have yet, a few programs at once, until that time; whether it has all now."""
    for name, world in WORLDS.items():
        left = _left(folder / slug(name))
        for some in (left[i : i + TOGETHER] for i in range(0, len(left), TOGETHER)):
            if time.monotonic() > until:
                return False
            sys.stderr.write(f"{name}: {', '.join(some)}\n")
            in_world(world, some, folder / slug(name))
    for program in _left(folder / slug(PLAIN)):
        if time.monotonic() > until:
            return False
        under_ddp(program, folder / slug(PLAIN))
    return True


def _left(folder: Path) -> list[str]:
    """Programs of which nothing is known there."""
    return [name for name in names() if not (folder / f"{name}.pt").exists()]


def ddp_verdict(found: Outcome) -> str:
    """A cell of the column of plain DDP."""
    return {"": "trains", DIFFER: "nodes differ"}.get(found.sentence, "fails")


def summary(folder: Path) -> str:
    """How many of the programs that plain DDP trains are trained; what lacks a word counts as the one that has it."""
    chosen = [name for name in names() if not name.endswith(LACKING)]
    by_ddp = [name for name in chosen if not outcome_in(folder / slug(PLAIN), name).sentence]
    uneven = [slug(name) for name, world in WORLDS.items() if "," in world.shares and world.strategy == "auto"]
    ours = [name for name in by_ddp if not any(outcome_in(folder / world, name).sentence for world in uneven)]
    return (
        f"Of the {len(chosen)} programs that do not lack such a word, plain DDP on two equal nodes comes to the end of "
        f"{len(by_ddp)} with the same weights on both. Of these {len(by_ddp)}, {len(ours)} "
        f"({len(ours) / len(by_ddp):.0%}) are trained on uneven nodes, as on one."
    )


def slug(world: str) -> str:
    """A folder's name."""
    return world.replace(":", "-").replace(" ", "-")


def table(folder: Path) -> str:
    """Every program with its verdicts, in Markdown."""
    rows = [
        "| program | lines | " + " | ".join([*WORLDS, PLAIN]) + " |",
        "|---" * (3 + len(WORLDS)) + "|",
    ]
    for name in names():
        text = source(name)
        what = (ast.get_docstring(ast.parse(text)) or "").removesuffix(".")
        expected = perform(plain(text), name)
        cells = [verdict(outcome_in(folder / slug(world), name), expected) for world in WORLDS]
        cells.append(ddp_verdict(outcome_in(folder / slug(PLAIN), name)))
        rows.append(f"| `{name}`: {what} | {changed_lines(text)} | {' | '.join(cells)} |")
    return "\n".join([*rows, "", *textwrap.wrap(summary(folder), 118)])


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--seconds", type=float, default=math.inf)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = words.keep or Path(scratch)
        if not find(folder, time.monotonic() + words.seconds):
            sys.exit(f"there is more to do: the same once more goes on, with what is in {folder}")
        made = table(folder)
    if words.write is None:
        sys.stdout.write(made + "\n")
        return
    head, _, rest = words.write.read_text().partition(BEGIN)
    words.write.write_text(f"{head}{BEGIN}\n\n{made}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
