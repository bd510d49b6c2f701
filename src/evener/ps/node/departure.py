"""A node's departure on notice: it finishes what it works on, and goes, so that nothing is lost or done again.

a stop signal, or a command       ->  Notice  ->  the master gives it nothing new, and dismisses it when it is done
the time for that is over         ->  the node ends as by Ctrl-C, and its unfinished work goes to others

A thread sends the notice, because the signal may interrupt the main thread while it sends or computes.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from typing import IO
from urllib.parse import quote

import psutil

from evener.ps.protocol.messages import Header, Leave, Notice
from evener.records.errors import Interrupted
from evener.system.file_lock import is_locked, lock_file
from evener.system.process_exit import exit_now
from evener.system.signals import interrupt_main_thread

_COMMAND = "`evener leave` was typed"
_SIGNAL = "its process was asked to end"
_FOLDER, _NODE, _REQUEST = "leaving", ".node", ".leave"
_LOOK_SECONDS, _TRIES = 0.1, 3
_SAME_SECONDS = 1.0
"""Time in which further signals belong to the first one: `timeout` and service managers send it twice."""
_BROKEN_SECONDS = 3.0
"""Time in which a broken connection may be replaced."""
_LAST_SECONDS = 10.0
"""Time in which the main thread ends after it was interrupted."""


class Departure:
    """The departure of one node; close it.

    Args:
        seconds: time to finish the work; 0: leave at once.
        request: file by which `evener leave` asks for the departure; None if it cannot.
        send: sends a message to the master if the connection works.
        has_work: whether the node has work that others wait for.
        is_connected: whether the connection to the master works.
        on_notice: called in a thread once the node has given notice.
        log: shows a message to the user.

    Attributes:
        reason: why the node leaves; empty if it does not.
        is_requested: whether a command requested it: the process then ends without an error.
    """

    def __init__(
        self,
        seconds: float,
        request: Path | None,
        send: Callable[[Header], None],
        has_work: Callable[[], bool],
        is_connected: Callable[[], bool],
        on_notice: Callable[[], None],
        log: Callable[[str], None],
    ) -> None:
        self.reason, self.is_requested = "", False
        self._seconds, self._request, self._log = seconds, request, log
        self._send, self._has_work, self._is_connected, self._on_notice = send, has_work, is_connected, on_notice
        self._signalled, self._is_final = -inf, False
        self._until: float | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="evener-departure", daemon=True)
        self._thread.start()

    def on_signal(self) -> None:
        """Give notice at the first stop signal; a further one ends the node at once. Called in a signal's handler."""
        now = time.monotonic()
        if self._is_final or (self.reason and now - self._signalled > _SAME_SECONDS):
            raise KeyboardInterrupt
        self._signalled = now if not self.reason else self._signalled
        self.reason = self.reason or _SIGNAL

    def request(self, seconds: float, reason: str) -> None:
        """Give notice because the master asks for it; nothing happens if the node leaves already."""
        if not self.reason:
            self._seconds, self.is_requested = seconds, True
            self.reason = reason

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
        """Wait for a request, give notice, and interrupt the main thread if it does not end in time."""
        try:
            while not self._is_over.wait(_LOOK_SECONDS) and not self._has_request():
                pass
            if not self._is_over.is_set() and self._seconds and self._has_work():
                self._give_notice()
                self._let_finish()
        finally:  # also after an error, which would let the node stay for ever
            if not self._is_over.is_set():
                self._interrupt()

    def _has_request(self) -> bool:
        if not self.reason and self._request is not None and self._request.exists():
            self.reason, self.is_requested = _COMMAND, True
        return bool(self.reason)

    def _give_notice(self) -> None:
        self._until = time.monotonic() + self._seconds
        self.repeat()
        self._on_notice()
        self._log(f"leaving: finishing the work in progress, for at most {self._seconds:g} s; Ctrl-C ends it at once")

    def _let_finish(self) -> None:
        """Return when the time is over, no work is left, or the connection has been broken for a while."""
        assert self._until is not None
        connected = time.monotonic()
        while not self._is_over.wait(_LOOK_SECONDS) and self._has_work():
            now = time.monotonic()
            connected = now if self._is_connected() else connected
            if now >= self._until or now - connected > _BROKEN_SECONDS:
                return

    def _interrupt(self) -> None:
        """Interrupt the main thread, and end the process if that does not help, as in a call that never returns."""
        self._is_final = True
        interrupt_main_thread()
        if not self._is_over.wait(_LAST_SECONDS):
            self._send(Leave())
            exit_now(Interrupted.exit_code)


@contextmanager
def leave_request(cache: Path, name: str) -> Iterator[Path | None]:
    """Yield the file by which `evener leave` asks the node `name` to leave, and show that the node runs.

    Yields None if another node of this name runs here, which the master will send away.
    """
    folder = _folder_in(cache)
    folder.mkdir(parents=True, exist_ok=True)
    node = folder / f"{_file_of(name)}{_NODE}"
    request = node.with_suffix(_REQUEST)
    if (lock := _locked(node)) is None:
        yield None
        return
    with lock:
        lock.truncate(0)
        lock.write(f"{os.getpid()} {psutil.Process().create_time()}\n{name}")
        lock.flush()
        request.unlink(missing_ok=True)
        try:
            yield request
        finally:
            for file in (request, node):
                with suppress(PermissionError):  # Windows removes no open file
                    file.unlink(missing_ok=True)


def _locked(node: Path) -> IO[str] | None:
    """Return the locked file of a node; None if another process holds it for longer than `evener leave` does."""
    for _ in range(_TRIES):
        with suppress(PermissionError):
            if (lock := lock_file(node)) is not None:
                with suppress(FileNotFoundError):
                    if os.path.samestat(node.stat(), os.fstat(lock.fileno())):
                        return lock
                lock.close()  # the previous owner removed it
                continue
        time.sleep(_LOOK_SECONDS)
    return None


def running_nodes(cache: Path) -> list[str]:
    """Return the names of the nodes that run on this machine with this cache."""
    names = []
    for node in sorted(_folder_in(cache).glob(f"*{_NODE}")):
        with suppress(OSError, ValueError):  # of another user, or it has ended since
            process, name = node.read_text(encoding="utf-8").split("\n", 1)
            locked = is_locked(node)
            if _is_running(*process.split()) if locked is None else locked:
                names.append(name)
    return names


def _is_running(pid: str, created: str) -> bool:
    """Return whether the process `pid` that was created at time `created` still runs."""
    try:
        return str(psutil.Process(int(pid)).create_time()) == created
    except psutil.Error:
        return False


def ask_to_leave(cache: Path, name: str) -> None:
    """Ask a running node to leave. Raises OSError."""
    (_folder_in(cache) / f"{_file_of(name)}{_REQUEST}").touch()


def _folder_in(cache: Path) -> Path:
    """Return the folder of this machine's nodes; other machines may share the cache."""
    return cache / _FOLDER / quote(socket.gethostname(), safe="")


def _file_of(name: str) -> str:
    """Return a name of a file for the node of any name."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]
