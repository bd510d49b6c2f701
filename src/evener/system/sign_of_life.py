"""Progress messages: a line every few seconds during a long operation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SILENCE_SECONDS = 2.5


@contextmanager
def sign_of_life(say: Callable[[str], object], line: str) -> Iterator[None]:
    """Call `say` with `line` and the elapsed seconds every few seconds while the block runs."""
    over = threading.Event()

    def repeat() -> None:
        count = 1
        while not over.wait(_SILENCE_SECONDS):
            say(f"{line} ({count * _SILENCE_SECONDS:.0f} s)")
            count += 1

    thread = threading.Thread(target=repeat, name="evener-sign-of-life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
