"""What needs no PyTorch: reports of runs that were made elsewhere, and the versions of what is installed."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

from evener.host import version_of
from evener.record import TrainRecord
from evener.report.html import write_page
from evener.schema import read_noun

_PACKAGES = ("evener", "torch", "torchvision", "numpy", "msgspec", "safetensors", "matplotlib", "tensorboard")


def report(paths: Sequence[Path], output: Path) -> None:
    """`evener report`: write one page of one or several records."""
    records = {_label(path, paths): read_noun(path, TrainRecord) for path in paths}
    write_page(output, records, title=", ".join(records))


def _label(path: Path, others: Sequence[Path]) -> str:
    """A short name for a record: that of its folder where this tells it from the others, else its whole path."""
    names = [other.resolve().parent.name for other in others]
    name = path.resolve().parent.name
    return name if names.count(name) == 1 else str(path)


def versions() -> dict[str, str]:
    """`evener version`: of Python and of every package that matters, or the words `not installed`."""
    return {"python": platform.python_version(), **{name: version_of(name) or "not installed" for name in _PACKAGES}}
