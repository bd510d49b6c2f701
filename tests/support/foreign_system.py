"""Simulates what Windows lacks, in this process: modules, calls, sockets and signals of POSIX, and habits of its files.

    python foreign_system.py torch evener join ...    # `evener join ...` on such a system, with PyTorch
    EVENER_TEST_SYSTEM=windows pytest tests/...       # tests that do not need POSIX

It hides what a module of Evener could find by importing it or by `hasattr`. The standard library, NumPy and psutil are
imported before, and PyTorch if it is named, since theirs for Windows are other files. `sys.platform` stays, since NumPy
and PyTorch load their libraries by it. A real Windows still differs: how processes are ended, paths, and the console.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import getpass
import importlib
import multiprocessing.pool
import multiprocessing.resource_tracker
import os
import runpy
import select
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import psutil

_LIBRARIES = (asyncio, getpass, multiprocessing, np, psutil, selectors, shutil, subprocess, tempfile)
"""Imported before anything is hidden."""
MODULES = ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty")
_OF_OS = [
    "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_PATH", "chown", "fchmod", "fchown", "fork",
    "forkpty", "getegid", "geteuid", "getgid", "getloadavg", "getpgid", "getpgrp", "getsid", "killpg",
    "lchown", "memfd_create", "mkfifo", "nice", "pidfd_open", "posix_fallocate", "posix_fadvise", "pread", "preadv",
    "pwrite", "pwritev", "sched_getaffinity", "sched_setaffinity", "sched_setscheduler",
    "set_blocking", "setpgid", "setpriority", "setsid", "setuid", "sync", "sysconf", "wait",
    "waitid", "WNOHANG",
]  # fmt: skip
_OF_SIGNAL = [
    "SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSTOP", "SIGTSTP", "SIGUSR1",
    "SIGUSR2", "SIGWINCH", "alarm", "pause", "pthread_kill", "pthread_sigmask", "setitimer", "sigwait",
]  # fmt: skip
_OF_SOCKET = [
    "AF_UNIX", "CMSG_LEN", "MSG_DONTWAIT", "MSG_NOSIGNAL", "SCM_RIGHTS", "SO_REUSEPORT", "recv_fds", "send_fds",
]  # fmt: skip
_OF_SOCKETS = ["recvmsg", "recvmsg_into", "sendmsg", "sendmsg_afalg"]
_OF_SELECT = ["epoll", "poll"]
_DESCRIPTORS = Path("/proc/self/fd")


def leave_posix() -> None:
    """Hide from now on what Windows lacks. There is no way back in this process."""
    sys.modules["msvcrt"] = _msvcrt()
    del multiprocessing.context.ForkServerProcess
    library: Any = tempfile  # as the standard library does on Windows
    library.TemporaryFile = tempfile.NamedTemporaryFile
    library = shutil
    library._use_fd_functions = False
    library = subprocess
    library.os = types.SimpleNamespace(**vars(os))  # its calls for Windows are others
    library.Popen = type("Popen", (subprocess.Popen,), {"__init__": _started_without_posix(subprocess.Popen.__init__)})
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]  # so that importing it fails
    hidden: list[tuple[Any, list[str]]] = [(os, _OF_OS), (signal, _OF_SIGNAL), (socket, _OF_SOCKET)]
    for module, names in [*hidden, (select, _OF_SELECT)]:
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    for name in _OF_SOCKETS:
        setattr(socket.socket, name, property(_lacking(name)))
    os.open, os.fsync = _without_folders(os.open), _needing_write_access(os.fsync)
    for name in ("unlink", "remove", "replace", "rename"):
        setattr(os, name, _refusing_open_files(getattr(os, name)))


_FLOCK = struct.Struct("hhqqi0q")
"""The C structure `flock`."""
_F_OFD_SETLK = 37
"""Locks bytes for an open file, as Windows does, not for a process."""


def _msvcrt() -> types.ModuleType:
    """Windows's locks on bytes of a file."""
    module: Any = types.ModuleType("msvcrt")
    module.LK_NBLCK, module.LK_UNLCK = 2, 0

    def locking(descriptor: int, mode: int, count: int) -> None:
        kind = fcntl.F_WRLCK if mode == module.LK_NBLCK else fcntl.F_UNLCK
        lock = _FLOCK.pack(kind, os.SEEK_SET, os.lseek(descriptor, 0, os.SEEK_CUR), count, 0)
        try:
            fcntl.fcntl(descriptor, _F_OFD_SETLK, lock)
        except BlockingIOError as error:
            raise PermissionError(errno.EACCES, "another process has locked it") from error

    module.locking = locking
    return cast(types.ModuleType, module)


def _lacking(name: str) -> Callable[[object], NoReturn]:
    def get(_self: object) -> NoReturn:
        raise AttributeError(name)

    return get


def _started_without_posix(start: Any) -> Any:
    def started(process: Any, command: Any, **named: Any) -> None:
        if named.get("pass_fds") or named.get("preexec_fn"):
            raise ValueError("not supported on Windows")
        start(process, command, **named)

    return started


def _without_folders(call: Any) -> Any:
    def opened(path: Any, flags: int, *args: Any, **named: Any) -> int:
        if isinstance(path, str | os.PathLike) and Path(path).is_dir():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return int(call(path, flags, *args, **named))

    return opened


def _needing_write_access(call: Any) -> Any:
    def synced(descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        flags = int(Path(f"/proc/self/fdinfo/{number}").read_text().split("flags:")[1].split()[0], 8)
        if flags & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        call(number)

    return synced


def _refusing_open_files(call: Any) -> Any:
    """A file that this process has open can be neither removed nor replaced."""

    def changed(*paths: Any, **named: Any) -> None:
        for path in paths:
            if "dir_fd" not in named and os.path.exists(path) and os.path.realpath(path) in _open_files():
                raise PermissionError(errno.EACCES, "it is open in this process", str(path))
        call(*paths, **named)

    return changed


def _open_files() -> set[str]:
    found = set()
    for entry in os.listdir(_DESCRIPTORS):
        try:
            found.add(os.readlink(_DESCRIPTORS / entry))
        except OSError:
            continue
    return found


if __name__ == "__main__":
    libraries, module, *words = sys.argv[1:]
    del sys.path[0]  # the folder of this file
    for library in filter(None, libraries.split(",")):
        importlib.import_module(library)
    leave_posix()
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
