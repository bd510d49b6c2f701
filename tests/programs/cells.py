"""Programs as people publish them, many in a file of `published/`: what comes before the first cell belongs to all.

A cell begins with `# %% name: what it is`, as editors know it.
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent / "published"
_CELL = re.compile(r"^# %% (\w+): .*$", re.MULTILINE)


def cell_names() -> list[str]:
    """Of all cells: the file's name, a dot, and the cell's."""
    return [f"{path.stem}.{name}" for path in sorted(FOLDER.glob("*.py")) for name in _CELL.findall(path.read_text())]


def program_of(name: str) -> str:
    """The whole program of a cell."""
    file, _, cell = name.partition(".")
    common, *parts = _CELL.split((FOLDER / f"{file}.py").read_text())
    return common + parts[1::2][parts[::2].index(cell)]
