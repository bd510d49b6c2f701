"""Whether the calling thread records what it computes."""

from __future__ import annotations

import threading
from contextlib import ContextDecorator
from types import TracebackType


class _Mode(threading.local):
    enabled = True


mode = _Mode()


class no_grad(ContextDecorator):
    """Inside `with no_grad():`, or in a function decorated with `@no_grad()`, nothing is recorded."""

    def __init__(self) -> None:
        self._before: list[bool] = []

    def _recreate_cm(self) -> no_grad:
        """A decorated function gets one for each call, because several threads may call it."""
        return no_grad()

    def __enter__(self) -> None:
        self._before.append(mode.enabled)
        mode.enabled = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        mode.enabled = self._before.pop()


def is_grad_enabled() -> bool:
    """Whether operations are recorded."""
    return mode.enabled
