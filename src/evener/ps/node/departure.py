"""A node's departure on notice: it finishes what it works on, and goes, so that nothing is lost or done again.

a stop signal, or `evener leave`  ->  Notice  ->  the master gives it nothing new, and dismisses it when it is done
the time for that is over         ->  the node ends as by Ctrl-C, and its unfinished work goes to others

A thread sends the notice, because the signal may interrupt the main thread while it sends or computes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote, unquote

from evener.ps.protocol.messages import Header, Notice
from evener.system.file_lock import lock_file
from evener.system.signals import interrupt_main_thread

COMMAND = "`evener leave` was typed"
_SIGNAL = "its process was asked to end"
_FOLDER, _NODE, _REQUEST = "leaving", ".node", ".leave"
_LOOK_SECONDS = 0.1
_TRIES = 3
_MAX_FILE_NAME = 200


class Departure:
    """The departure of one node; close it.

    Args:
        seconds: time to finish the work; 0: leave at once.
        request: file by which `evener leave` asks for the departure.
        send: sends a message to the master if the connection works.
        is_needed: whether the node has work that others wait for, and is connected.
        on_notice: called in a thread once the node has given notice.
        log: shows a message to the user.

    Attributes:
        reason: why the node leaves; empty if it does not.
    """

    def __init__(
        self,
        seconds: float,
        request: Path | None,
        send: Callable[[Header], None],
        is_needed: Callable[[], bool],
        on_notice: Callable[[], None],
        log: Callable[[str], None],
    ) -> None:
        self.reason = ""
        self._seconds, self._request, self._log = seconds, request, log
        self._send, self._is_needed, self._on_notice = send, is_needed, on_notice
        self._until: float | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="evener-departure", daemon=True)
        self._thread.start()

    def on_signal(self) -> None:
        """Give notice at the first stop signal; a further one ends the node at once. Called in a signal's handler."""
        if self.reason:
            raise KeyboardInterrupt
        self.reason = _SIGNAL

    def repeat(self) -> None:
        """Give notice again, over a new connection."""
        if self._until is not None:
            self._send(Notice(seconds=max(0.0, self._until - time.monotonic()), reason=self.reason))

    def close(self) -> None:
        """End the thread."""
        self._is_over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_SECONDS):
            if not self.reason and self._request is not None and self._request.exists():
                self.reason = COMMAND
            if self.reason and self._until is None:
                self._give_notice()
            if self._until is not None and (time.monotonic() >= self._until or not self._is_needed()):
                interrupt_main_thread()
                return

    def _give_notice(self) -> None:
        if not self._seconds or not self._is_needed():
            self._until = time.monotonic()
            return
        self._log(f"leaving: finishing the work in progress, for at most {self._seconds:g} s; Ctrl-C ends it at once")
        self._until = time.monotonic() + self._seconds
        self._on_notice()
        self.repeat()


@contextmanager
def leave_request(cache: Path, name: str) -> Iterator[Path]:
    """Yield the file by which `evener leave` asks the node `name` to leave, and show that the node runs."""
    folder, file = cache / _FOLDER, _file_of(name)
    folder.mkdir(parents=True, exist_ok=True)
    node, request = folder / f"{file}{_NODE}", folder / f"{file}{_REQUEST}"
    lock = None
    for _ in range(_TRIES):  # `evener leave` holds it for a moment
        with suppress(PermissionError):
            lock = lock_file(node)
        if lock is not None:
            break
        time.sleep(_LOOK_SECONDS)
    if lock is None:  # another node of this name runs here, which the master will send away
        yield folder / f"{os.getpid()}{_REQUEST}"
        return
    with lock:
        request.unlink(missing_ok=True)
        yield request
    with suppress(OSError):
        request.unlink(missing_ok=True)
        node.unlink()


def running_nodes(cache: Path) -> list[str]:
    """Return the names of the nodes that run on this machine with this cache."""
    names = []
    for node in sorted((cache / _FOLDER).glob(f"*{_NODE}")):
        try:
            lock = lock_file(node)
        except OSError:  # of another user
            continue
        if lock is None:
            names.append(unquote(node.name.removesuffix(_NODE)))
        else:
            lock.close()
    return names


def ask_to_leave(cache: Path, name: str) -> None:
    """Ask a running node to leave. Raises OSError."""
    (cache / _FOLDER / f"{_file_of(name)}{_REQUEST}").touch()


def _file_of(name: str) -> str:
    """Return the name of a node as the name of a file; the master refuses longer names."""
    return quote(name, safe="")[:_MAX_FILE_NAME]
