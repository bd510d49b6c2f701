"""Messages between a process of this machine and the one that started it, over pipes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from types import FrameType
from typing import NoReturn

import msgspec

from evener.records.decoding import msgpack_decoder
from evener.records.error_kind import ErrorKind, kind_of
from evener.records.errors import EvenerError, NodeLost, exit_code_of, explain
from evener.system.process_exit import end_after_threads, exit_now

_STOP_SECONDS = 3.0
"""Time within which the parent's message follows a SIGTERM to both."""
STOP, CARRY_ON = b"stop", b"carry on"
"""Messages of the parent about a SIGTERM: it is the parent's, or the parent ends this process later by itself."""


class Sent(msgspec.Struct, frozen=True, tag=True):
    """A message for the process that started this one."""

    data: bytes


class Said(msgspec.Struct, frozen=True, tag=True):
    """A message for the coordinator of an elastic run, in the process that started this one."""

    data: bytes


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The report of a process that ends with an error.

    Attributes:
        is_own: whether the error arose here, not from the loss of another process.
        kind: of the error.
        sentence: for the user.
        traceback: for developers; empty for errors that the sentence explains.
    """

    is_own: bool
    kind: ErrorKind
    sentence: str
    traceback: str = ""

    def as_error(self) -> EvenerError:
        """Return the error with its original class, for the process that started this one.

        Prints the traceback, if there is one.
        """
        sys.stderr.write(self.traceback)
        return self.kind.as_error(self.sentence)


class Done(msgspec.Struct, frozen=True, tag=True):
    """The report of a process that has done its work."""


decoder = msgpack_decoder(Sent | Said | Failed | Done)


class Parent:
    """A process's connection to the one that started it.

    Args:
        pipe: for messages in both directions.
        stop: readable once this process has to stop.
    """

    def __init__(self, pipe: Connection, stop: Connection) -> None:
        self._pipe, self._stop, self._sending = pipe, stop, threading.Lock()

    def send(self, data: bytes) -> None:
        """Send `data`, from any thread."""
        self._send(Sent(data))

    def say(self, data: bytes) -> None:
        """Send `data` to the coordinator, from any thread. Raises OSError if it is gone."""
        self._send(Said(data))

    def hear(self) -> bytes:
        """Wait for the coordinator's next message. Raises EOFError or OSError if it is gone."""
        return self._pipe.recv_bytes()

    def on_stop(self, stop: Callable[[], None]) -> None:
        """Call `stop` when the parent asks this process to stop.

        The parent sends a message and then SIGTERM. A SIGTERM without that message ends this process only, as for any
        other process. A service manager sends SIGTERM to parent and children together; the message then follows a
        moment later, or one that this process may carry on.
        """

        received, obeying = list[bytes](), list[int]()

        def obey(number: int, _frame: FrameType | None) -> None:
            if obeying:  # this signal interrupts the answer to one before
                return
            obeying.append(number)
            seconds = 0.0 if received else _STOP_SECONDS
            while STOP not in received and self._stop.poll(seconds):
                received.append(self._receive_stop())
                seconds = 0.0
            obeying.clear()
            if STOP in received:
                stop()
            elif not received:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        signal.signal(signal.SIGTERM, obey)

    def _receive_stop(self) -> bytes:
        try:
            return self._stop.recv_bytes()
        except EOFError:  # the parent has ended
            return STOP

    def end(self, error: BaseException | None = None) -> NoReturn:
        """Report how this process ends, and end it: after its threads, or at once because of an error."""
        if error is None:
            end_after_threads(partial(self._end, None))
        self._end(error)

    def _end(self, error: BaseException | None) -> NoReturn:
        code = 0
        with contextlib.suppress(OSError):
            if error is None:
                self._send(Done())
            else:
                code, (sentence, trace) = exit_code_of(error), explain(error)
                self._send(Failed(not isinstance(error, NodeLost), kind_of(error), sentence, trace))
        if isinstance(error, NodeLost):
            os._exit(code)
        exit_now(code)

    def _send(self, message: Sent | Said | Failed | Done) -> None:
        with self._sending:
            self._pipe.send_bytes(msgspec.msgpack.encode(message))
