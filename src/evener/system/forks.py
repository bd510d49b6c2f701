"""Forks of this process that go on beside it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_left_to_parent() -> Iterator[None]:
    """Keep a fork that is made inside from collecting objects of this process; those with threads would abort it."""
    parent = os.getpid()
    gc.freeze()
    try:
        yield
    finally:
        if os.getpid() == parent:
            gc.unfreeze()
