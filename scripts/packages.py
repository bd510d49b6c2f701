"""Draws the packages and their allowed imports into docs/architecture.md, from pyproject.toml and their docstrings.

`python scripts/packages.py` writes the drawing between its two marks; `--check` fails if the page has another one.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- packages: made by scripts/packages.py -->", "<!-- end of packages -->"


def layers() -> list[list[str]]:
    """The packages of every layer, the highest first, as import-linter checks them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    rules = next(contract for contract in contracts if contract["type"] == "layers")
    return [[package.strip(" ()") for package in layer.split("|")] for layer in rules["layers"]]


def first_line(package: str) -> str:
    """Return the first paragraph of a package's docstring."""
    folder = ROOT / "src" / "evener" / package
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    words = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
    return " ".join(words.split())


def drawing() -> str:
    """The picture, for Mermaid, and the table below it."""
    rows = layers()
    lines = [BEGIN, "", "```mermaid", "flowchart TB"]
    for number, packages in enumerate(rows):
        lines.append(f'  subgraph layer{number}[" "]')
        lines.append("    direction LR")
        lines += [f"    {_node(package)}" for package in packages]
        lines.append("  end")
    lines += [f"  layer{number} --> layer{number + 1}" for number in range(len(rows) - 1)]
    lines += ["```", "", "| package | what it is for |", "|---|---|"]
    lines += [f"| {_file(package)} | {first_line(package)} |" for packages in rows for package in packages]
    return "\n".join([*lines, "", END])


def _node(package: str) -> str:
    return f"{package.strip('_')}[{_file(package).strip('`')}]"


def _file(package: str) -> str:
    return f"`{package}/`" if (ROOT / "src" / "evener" / package).is_dir() else f"`{package}.py`"


def main() -> None:
    """Write the drawing, or check it."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    wanted = before + drawing() + rest.partition(END)[2]
    if "--check" in sys.argv:
        sys.exit(
            0
            if text == wanted
            else "docs/architecture.md does not show the packages as they are: python scripts/packages.py"
        )
    PAGE.write_text(wanted)


if __name__ == "__main__":
    main()
