"""Runs all programs in all worlds and prints the table; `--write docs/programs.md` puts it into the page."""

from __future__ import annotations

import argparse
import ast
import sys
import tempfile
from pathlib import Path

from programs.suite import WORLDS, Outcome, changed_lines, in_world, names, off, perform, plain, source

BEGIN, END = "<!-- programs: made by python -m programs -->", "<!-- end of programs -->"


def verdict(found: Outcome, expected: Outcome) -> str:
    """A cell of the table."""
    if found.sentence:
        return "refused" if found.is_refused else "FAILED"
    return f"{off(found, expected):.0e}"


def table() -> str:
    """Every program with its verdicts, in Markdown."""
    rows = [
        "| program | lines | " + " | ".join(f"nodes {world}" for world in WORLDS) + " |",
        "|---" * (2 + len(WORLDS)) + "|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        found = {
            world: in_world(shares, names(), Path(folder) / str(i)) for i, (world, shares) in enumerate(WORLDS.items())
        }
    for name in names():
        text = source(name)
        what = (ast.get_docstring(ast.parse(text)) or "").removesuffix(".")
        expected = perform(plain(text), name)
        cells = " | ".join(verdict(found[world][name], expected) for world in WORLDS)
        rows.append(f"| `{name}`: {what} | {changed_lines(text)} | {cells} |")
    return "\n".join(rows)


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    page = parser.parse_args().write
    made = table()
    if page is None:
        sys.stdout.write(made + "\n")
        return
    head, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{head}{BEGIN}\n\n{made}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
