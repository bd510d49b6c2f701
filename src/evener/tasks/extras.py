"""Says what to type when an optional dependency is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from evener.errors import MissingExtra

EXTRAS = {"torch": ("PyTorch", "torch"), "torchvision": ("torchvision", "vision"), "PIL": ("Pillow", "vision")}
"""Module -> its name for people, and the extra of Evener that installs it."""


@contextmanager
def needing_extras() -> Iterator[None]:
    """Turns the absence of an optional dependency in this block into MissingExtra; other errors pass as they are."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        name, extra = EXTRAS[error.name]
        raise MissingExtra(f"{name} is not installed: pip install 'evener[{extra}]'") from error
