"""The scripts of benchmarks/, which are no package: each imports its neighbours by name."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "benchmarks"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.py") if "def main(" in path.read_text()))


def benchmark(name: str) -> ModuleType:
    """The script `name`, imported and not run."""
    sys.path.insert(0, str(FOLDER))
    try:
        return import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
