"""Signals that end a command: Ctrl-C, SIGTERM of a scheduler or a service manager, SIGHUP of a terminal that closes.

A signal that this process was started to ignore (`&` in a script, nohup) stays ignored: no handler is ever put there.
"""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""All of them ask a command to end."""
_READER_SECONDS = 0.1
"""Within which a program that reads our output ends by the same SIGHUP."""


@contextmanager
def interrupt_on_stop_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP end the process as Ctrl-C does, by KeyboardInterrupt."""
    with _handled(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def requests_to_stop() -> Iterator[list[int]]:
    """Inside, these signals interrupt nothing: their numbers are collected, for whoever looks at them now and then.

    An interruption amid receiving would lose a part of a message, and with it the beginning of the next.
    """
    found: list[int] = []

    def collect(number: int, _frame: FrameType | None) -> None:
        found.append(number)

    with _handled(collect, *STOP_SIGNALS):
        yield found


@contextmanager
def first_request(answer: Callable[[], None]) -> Iterator[None]:
    """Inside, the first of the signals calls `answer`; the next acts as it would without us."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def handle(number: int, _frame: FrameType | None) -> None:
        answer()
        signal.signal(number, before[signal.Signals(number)])

    with _handled(handle, *before):
        yield


def set_handler(number: signal.Signals, handler: Callable[[int, FrameType | None], Any]) -> None:
    """From now on signal `number` calls `handler`, unless it is ignored."""
    if signal.getsignal(number) is signal.SIG_IGN:
        return

    def handle(received: int, frame: FrameType | None) -> None:
        if received == signal.SIGHUP:
            leave_closed_terminal()
        handler(received, frame)

    signal.signal(number, handle)


def leave_closed_terminal() -> None:
    """Discard what is written to a terminal that has closed, or to a pipe whose reader has ended, from now on.

    Otherwise the next line that a command prints would fail, and end it before it has written a checkpoint.
    """
    outputs = select.poll()
    for descriptor in (1, 2):
        outputs.register(descriptor, 0)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for pause in (0.0, _READER_SECONDS):
        time.sleep(pause)
        for descriptor, _ in outputs.poll(0):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


class _Terminal(io.FileIO):
    """An output of this process that is a terminal, as long as that is there; what is written afterwards is lost."""

    def write(self, data: Any) -> int:
        """Write some of `data`; the number of bytes."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            leave_closed_terminal()
            return super().write(data)


def outlive_terminal() -> None:
    """Have `sys.stdout` and `sys.stderr` outlive the terminal that they are.

    A write that waits for a slow terminal fails when that closes, before any signal is handled.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.isatty():
            terminal = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
            text = io.TextIOWrapper(
                terminal, stream.encoding, stream.errors, line_buffering=True, write_through=stream.write_through
            )
            setattr(sys, name, text)


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], Any], *numbers: signal.Signals) -> Iterator[None]:
    """Inside, signals go to `handler`; only the main thread may say so, others change nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        set_handler(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
