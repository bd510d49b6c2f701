"""Rows of an experiment as files: CSV with all columns, and figures where Matplotlib is installed."""

from __future__ import annotations

import csv
import importlib.util
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from evener.atomic import atomic_write


def write_csv(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Write all columns of `rows`, which all have those of the first; makes the folder."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, text.getvalue().encode())


def can_draw() -> bool:
    """Whether Matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None
