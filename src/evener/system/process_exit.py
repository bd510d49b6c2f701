"""Exits of a process: together with its parent, or despite a Gloo thread that may crash an ordinary exit."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.util import get_temp_dir
from typing import Any, NoReturn

from evener.records.errors import InvalidInput, NodeLost

_SHORT_FOLDER = "/tmp"
_MAX_FOLDER_BYTES = 64
"""Longest name of a folder for temporary files: 107 bytes of a socket's path, without two names in that folder."""
_THREADS_SECONDS = 30.0
"""Seconds that a program's threads have after its work is done: without a limit they would keep a node occupied."""
_PR_SET_PDEATHSIG = 1
"""Option of prctl(2)."""


def end_after_threads(end: Callable[[], NoReturn]) -> NoReturn:
    """Call `end` once all threads that are no daemons have ended, or after 30 s. Idle threads of pools end first.

    Args:
        end: ends the process; after 30 s it is called in another thread, and the remaining threads are named on stderr.
    """
    late = threading.Timer(_THREADS_SECONDS, _give_up_threads, (end,))
    late.daemon = True
    late.start()
    threading._shutdown()  # type: ignore[attr-defined]  # `multiprocessing` ends its processes this way, too
    late.cancel()
    end()


def _give_up_threads(end: Callable[[], NoReturn]) -> None:
    main = threading.main_thread()
    names = ", ".join(thread.name for thread in threading.enumerate() if thread is not main and not thread.daemon)
    seconds = f"{_THREADS_SECONDS:g} s"
    sys.stderr.write(f"evener: the program left threads running, which were ended after {seconds}: {names}\n")
    end()


def exit_now(code: int) -> NoReturn:
    """Run the exit functions (`atexit`) of a program and its libraries, then end at once.

    Otherwise loggers would lose their last lines, and Python would report leaked locks of `multiprocessing`, of which a
    progress bar has one.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def put_worker_sockets_into(folder: str) -> None:
    """Choose the folder for `own_worker_sockets`; the process that started this one removes it."""
    _worker_folders.append(folder)


def own_worker_sockets() -> None:
    """Let data loaders' workers that start later put their sockets into a folder that outlives none of their starters.

    By default each worker makes a folder, and leaves it behind when it is killed.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if (folder := launch_folder()) is not None:
        config["tempdir"] = folder
    elif config.get("tempdir") is None and (short := folder_for_sockets()) != tempfile.gettempdir():
        config["tempdir"] = tempfile.mkdtemp(prefix="evener-", dir=short)
        atexit.register(shutil.rmtree, config["tempdir"], ignore_errors=True)
    else:
        get_temp_dir()  # which this process removes at its end


def folder_for_sockets() -> str:
    """Return the folder for temporary files, or /tmp if the paths of sockets in it would be too long.

    Raises:
        InvalidInput: they would, and this process cannot write to /tmp.
    """
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= _MAX_FOLDER_BYTES:
        return usual
    if not os.access(_SHORT_FOLDER, os.W_OK | os.X_OK):
        raise InvalidInput(
            f"the folder for temporary files, {usual}, has too long a name for the sockets of processes: set $TMPDIR "
            f"to one of at most {_MAX_FOLDER_BYTES} characters"
        )
    return _SHORT_FOLDER


def launch_folder() -> str | None:
    """Return a folder that the process that started this one removes, however this one ends; None without one."""
    if not _worker_folders:
        return None
    os.makedirs(_worker_folders[-1], mode=0o700, exist_ok=True)
    return _worker_folders[-1]


_worker_folders: list[str] = []
"""Folder for the sockets of this process's workers; empty in a process that chooses one itself."""


def exit_with_parent() -> None:
    """End this process as soon as the process that started it has ended.

    A thread waits for that, so a stopped process does not end; see `kill_with_starter`.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(NodeLost.exit_code)

    threading.Thread(target=follow, name="evener-parent", daemon=True).start()


def kill_with_starter() -> None:
    """Let the kernel kill this process, forked by a fork server, when the process that requested it has ended.

    It is killed even while it is stopped. A fork server ends when no process holds the other end of its pipe. This
    process closes that end, so the server ends with the process that started the server, and the kernel then kills the
    forks of the server.
    """
    server: Any = forkserver._forkserver  # whose pipe has no public name
    if server._forkserver_alive_fd is not None and server._forkserver_pid is None:  # inherited, not made here
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None  # a process that this one starts by a fork server has another server
    kill_with_parent()
    kill_forks_with_parent()


def kill_forks_with_parent() -> None:
    """Let the kernel kill every later fork of the main thread when this process has ended.

    A fork returns once its child is bound to this process, since a child that is stopped earlier would never end.
    Forks of other threads are not killed, since the kernel counts the thread as the parent, which they may outlive.
    """
    if not _pipe_ends:
        _pipe_ends.append(())
        os.register_at_fork(before=_open_pipe, after_in_parent=_wait_until_bound, after_in_child=_bind_to_parent)


def kill_with_parent() -> None:
    """Let the kernel kill this process when the thread that forked it ends, on Linux; do nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


_pipe_ends: list[tuple[int, ...]] = []
"""Ends of a pipe to the child that the main thread is forking, or an empty tuple; none before the first call."""
_BINDING_MS = 10_000
"""Longest wait for a child, in milliseconds. Only one that was stopped at once needs it."""


def _open_pipe() -> None:
    is_main = threading.current_thread() is threading.main_thread()
    _pipe_ends[0] = os.pipe() if is_main and sys.platform == "linux" else ()


def _bind_to_parent() -> None:
    if _pipe_ends[0]:
        kill_with_parent()
        receiving, sending = _pipe_ends[0]
        with contextlib.suppress(BrokenPipeError):  # the parent has ended already
            os.write(sending, b"1")
        os.close(receiving)
        os.close(sending)


def _wait_until_bound() -> None:
    if _pipe_ends[0]:
        receiving, sending = _pipe_ends[0]
        os.close(sending)  # so that the pipe is readable also when the child has died
        poll = select.poll()
        poll.register(receiving, select.POLLIN)
        poll.poll(_BINDING_MS)
        os.close(receiving)
