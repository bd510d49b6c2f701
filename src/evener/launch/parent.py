"""What a process of this machine says to the one that started it, and hears of it: over pipes, from first to last."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import FrameType
from typing import NoReturn

import msgspec

from evener.records.error_kind import ErrorKind, kind_of
from evener.records.errors import EvenerError, NodeLost, exit_code_of, explain
from evener.system.process_exit import exit_now

_STOP_SECONDS = 3.0
"""In which the parent's word comes when both got SIGTERM at the same time."""


class Sent(msgspec.Struct, frozen=True, tag=True):
    """Something for whoever started the process."""

    data: bytes


class Said(msgspec.Struct, frozen=True, tag=True):
    """Something for the authority of an elastic run, which is whoever started the process, too."""

    data: bytes


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The process ends with an error.

    Attributes:
        is_own: whether it arose here; else the connection to another process broke, or that one fell silent.
        kind: of the error.
        sentence: for the user.
        traceback: for whoever mends it; empty for errors that the sentence explains.
    """

    is_own: bool
    kind: ErrorKind
    sentence: str
    traceback: str = ""

    def as_error(self) -> EvenerError:
        """The error to be raised where the process was started, of the class that it had in the process.

        Prints the traceback, if there is one.
        """
        sys.stderr.write(self.traceback)
        return self.kind.as_error(self.sentence)


class Done(msgspec.Struct, frozen=True, tag=True):
    """The process has done its work and ends."""


decoder = msgspec.msgpack.Decoder(Sent | Said | Failed | Done)


class Parent:
    """A process's line to the one that started it.

    Args:
        pipe: for words in both directions.
        stop: becomes readable when this process is to stop.
    """

    def __init__(self, pipe: Connection, stop: Connection) -> None:
        self._pipe, self._stop, self._sending = pipe, stop, threading.Lock()

    def send(self, data: bytes) -> None:
        """Send `data`, from any thread."""
        self._send(Sent(data))

    def say(self, data: bytes) -> None:
        """Send `data` to the authority, from any thread. Raises OSError when it is gone."""
        self._send(Said(data))

    def hear(self) -> bytes:
        """The authority's next words; waits for them. Raises EOFError or OSError when it is gone."""
        return self._pipe.recv_bytes()

    def on_stop(self, stop: Callable[[], None]) -> None:
        """From now on call `stop` when the parent asks this process to stop.

        The parent does so by SIGTERM, after a word of its own. A SIGTERM without that word ends this process, as it
        ends any other: whoever sent it wants this one process gone. A service manager sends SIGTERM to parent and
        children together; the parent's word then comes a moment later.
        """

        def obey(number: int, _frame: FrameType | None) -> None:
            if self._stop.poll(_STOP_SECONDS):
                stop()
            else:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        signal.signal(signal.SIGTERM, obey)

    def end(self, error: BaseException | None = None) -> NoReturn:
        """Say how this process ends, and end it; at once if the others are gone, or go on without it."""
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
