"""Signals that end a command: Ctrl-C, and SIGTERM, which a scheduler or a service manager sends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def sigterm_is_ctrl_c() -> Iterator[None]:
    """Inside, SIGTERM ends the process as Ctrl-C does, by KeyboardInterrupt."""
    with _handled(signal.default_int_handler, signal.SIGTERM):
        yield


@contextmanager
def requests_to_stop() -> Iterator[list[int]]:
    """Inside, both signals interrupt nothing: their numbers are collected, for whoever looks at them now and then.

    An interruption amid receiving would lose a part of a message, and with it the beginning of the next.
    """
    found: list[int] = []

    def collect(number: int, _frame: FrameType | None) -> None:
        found.append(number)

    with _handled(collect, signal.SIGINT, signal.SIGTERM):
        yield found


@contextmanager
def first_request(answer: Callable[[], None]) -> Iterator[None]:
    """Inside, the first of the signals calls `answer`; the next acts as it would without us."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, _frame: FrameType | None) -> None:
        answer()
        signal.signal(number, before[signal.Signals(number)])

    with _handled(handle, *before):
        yield


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], Any], *numbers: signal.Signals) -> Iterator[None]:
    """Inside, signals go to `handler`; only the main thread may say so, others change nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
