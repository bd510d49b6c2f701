"""How a process ends: with its parent, or in spite of a thread of Gloo that may crash an ordinary exit."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import forkserver
from typing import Any, NoReturn

from evener.records.errors import NodeLost

_PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


def exit_now(code: int) -> NoReturn:
    """Do what a program, or a library of its, has registered for its exit (`atexit`), then end at once.

    Without that, loggers would lose their last lines, and Python would warn of locks of `multiprocessing`, of which a
    progress bar has one, as leaked.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_with_parent() -> None:
    """From now on, end this process as soon as the process that started it is gone.

    A thread waits for that, so a process that is stopped does not end; see `kill_with_starter`.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(NodeLost.exit_code)

    threading.Thread(target=follow, name="evener-parent", daemon=True).start()


def kill_with_starter() -> None:
    """Have the kernel kill this process, which a fork server has forked, when the process that asked for it is gone.

    It is killed even while it is stopped. A fork server ends when nobody holds the other end of its pipe any more. This
    process lets go of that end, so the server ends with the process that started the server, and the kernel then kills
    what the server has forked.
    """
    server: Any = forkserver._forkserver  # whose pipe has no public name
    if server._forkserver_alive_fd is not None and server._forkserver_pid is None:  # taken over, not made here
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None  # a process that this one starts by a fork server has another server
    kill_with_parent()
    kill_forks_with_parent()


def kill_forks_with_parent() -> None:
    """Have the kernel kill every process that the main thread forks from now on when this process is gone.

    What another thread forks may outlive that thread, which the kernel takes for the parent: it is left alone.
    """
    if not _forks:
        _forks.append(False)
        os.register_at_fork(before=_note_thread, after_in_child=_follow_fork)


def kill_with_parent() -> None:
    """Have the kernel kill this process when the thread that forked it ends, on Linux; elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


_forks: list[bool] = []
"""Whether the main thread forks just now; empty before `kill_forks_with_parent`."""


def _note_thread() -> None:
    _forks[0] = threading.current_thread() is threading.main_thread()


def _follow_fork() -> None:
    if _forks[0]:
        kill_with_parent()
