"""How a command that stays, a master or a node, speaks to its user and is ended by a service manager."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def say(sentence: str) -> None:
    """Tell the user of a master or node what happens."""
    sys.stderr.write(f"evener: {sentence}\n")
    sys.stderr.flush()


@contextmanager
def sigterm_is_ctrl_c() -> Iterator[None]:
    """Inside, a service manager's SIGTERM ends the process as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
