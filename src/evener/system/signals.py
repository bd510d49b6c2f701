"""Signals that end a command: Ctrl-C, SIGTERM of a scheduler or a service manager, SIGHUP of a closing terminal.

A signal that is ignored when this process starts (`&` in a script, nohup) stays ignored and gets no handler.
"""

from __future__ import annotations

import _thread
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

_HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)
"""Signal of a closing terminal; None on Windows."""
_BREAK: signal.Signals | None = getattr(signal, "SIGBREAK", None)
"""Signal of Ctrl-Break and of a closing console on Windows; None elsewhere."""
STOP_SIGNALS = tuple(one for one in (signal.SIGINT, signal.SIGTERM, _HANGUP, _BREAK) if one is not None)
"""Signals that ask a command to end."""
_READER_SECONDS = 0.1
"""Time within which a program that reads our output ends by the same SIGHUP."""


@contextmanager
def interrupt_on_stop_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does, by KeyboardInterrupt; `was_interrupted` says so later."""
    with _handled(_interrupt, *STOP_SIGNALS):
        yield


def was_interrupted() -> bool:
    """Return whether KeyboardInterrupt was raised; a library that is being imported may have swallowed it."""
    return bool(_interruptions)


_interruptions: list[int] = []


def _interrupt(number: int, frame: FrameType | None) -> None:
    _interruptions.append(number)
    signal.default_int_handler(number, frame)


@contextmanager
def stop_signals_call(handler: Callable[[], None]) -> Iterator[None]:
    """Let these signals call `handler` inside, in the main thread."""
    with _handled(lambda _number, _frame: handler(), *STOP_SIGNALS):
        yield


def interrupt_main_thread() -> None:
    """Send the main thread a SIGTERM from another thread; only the main thread notices, not the whole process."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    else:  # Windows, where a call of the system is not interrupted, but ends with the next heartbeat of the master
        _thread.interrupt_main(signal.SIGTERM)


@contextmanager
def requests_to_stop() -> Iterator[list[int]]:
    """Collect the numbers of these signals in a list inside, without an interruption.

    An interruption while receiving would lose a part of a message, and the boundary of the next one.
    """
    numbers: list[int] = []

    def collect(number: int, _frame: FrameType | None) -> None:
        numbers.append(number)

    with _handled(collect, *STOP_SIGNALS):
        yield numbers


@contextmanager
def first_request(answer: Callable[[], None]) -> Iterator[None]:
    """Call `answer` at the first of the signals inside; the next one acts as usual."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def handle(number: int, _frame: FrameType | None) -> None:
        answer()
        signal.signal(number, before[signal.Signals(number)])

    with _handled(handle, *before):
        yield


def set_handler(number: signal.Signals, handler: Callable[[int, FrameType | None], Any]) -> None:
    """Let signal `number` call `handler` from now on, unless it is ignored."""
    if signal.getsignal(number) is signal.SIG_IGN:
        return

    def handle(received: int, frame: FrameType | None) -> None:
        if received == _HANGUP:
            leave_closed_terminal()
        handler(received, frame)

    signal.signal(number, handle)


def leave_closed_terminal() -> None:
    """Discard output to a terminal that has closed, or to a pipe whose reader has ended, from now on.

    Otherwise the next printed line would fail, and end a command before it has written a checkpoint.
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
    """An output of this process to a terminal; output after the terminal has closed is lost."""

    def write(self, data: Any) -> int:
        """Write some of `data`; return the number of bytes."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            leave_closed_terminal()
            return super().write(data)


def outlive_terminal() -> None:
    """Let `sys.stdout` and `sys.stderr` survive the closing of their terminal.

    A write that waits for a slow terminal fails when it closes, before any signal is handled.
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
    """Send signals to `handler` inside; in other threads than the main thread, do nothing."""
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
