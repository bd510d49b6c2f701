"""Draws the rooms and their allowed imports into docs/architecture.md, from pyproject.toml and the rooms' first lines.

`python scripts/rooms.py` writes the drawing between its two marks; `--check` fails where it is not what is there.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms: made by scripts/rooms.py -->", "<!-- end of rooms -->"


def layers() -> list[list[str]]:
    """The rooms of every layer, the highest first, as import-linter checks them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    law = next(contract for contract in contracts if contract["type"] == "layers")
    return [[room.strip(" ()") for room in layer.split("|")] for layer in law["layers"]]


def first_line(room: str) -> str:
    """What a room says of itself in the first sentence of its docstring."""
    folder = ROOT / "src" / "evener" / room
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    words = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
    return " ".join(words.split())


def drawing() -> str:
    """The picture, for Mermaid, and the table below it."""
    rows = layers()
    lines = [BEGIN, "", "```mermaid", "flowchart TB"]
    for number, rooms in enumerate(rows):
        lines.append(f'  subgraph layer{number}[" "]')
        lines.append("    direction LR")
        lines += [f"    {_node(room)}" for room in rooms]
        lines.append("  end")
    lines += [f"  layer{number} --> layer{number + 1}" for number in range(len(rows) - 1)]
    lines += ["```", "", "| room | what it is for |", "|---|---|"]
    lines += [f"| {_file(room)} | {first_line(room)} |" for rooms in rows for room in rooms]
    return "\n".join([*lines, "", END])


def _node(room: str) -> str:
    return f"{room.strip('_')}[{_file(room).strip('`')}]"


def _file(room: str) -> str:
    return f"`{room}/`" if (ROOT / "src" / "evener" / room).is_dir() else f"`{room}.py`"


def main() -> None:
    """Write the drawing, or check it."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    wanted = before + drawing() + rest.partition(END)[2]
    if "--check" in sys.argv:
        sys.exit(
            0 if text == wanted else "docs/architecture.md does not show the rooms as they are: python scripts/rooms.py"
        )
    PAGE.write_text(wanted)


if __name__ == "__main__":
    main()
