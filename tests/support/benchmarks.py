"""The scripts of benchmarks/, which are no package: each imports its neighbours by name."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "benchmarks"
_PROGRAMS = tuple(path.stem for path in FOLDER.glob("*.py") if "def main(" in path.read_text())
NAMES = tuple(sorted(name for name in _PROGRAMS if not name.endswith("_script")))
"""Without the programs that a benchmark starts."""


def benchmark(name: str) -> ModuleType:
    """The script `name`, imported and not run."""
    sys.path.insert(0, str(FOLDER))
    try:
        return import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
