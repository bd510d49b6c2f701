"""Processes of this machine that end with the one that started them: ranks of a run, a master and its nodes.

    with LocalProcesses(preload) as processes:         all of them have ended after the block
        one = processes.start("node-0", target, ...)   target(parent, ...) runs there
        for process, data in processes.receive(0.2)    what parent.send(data) sent
        one.failure, one.has_finished                  how it ended

They are forked from a server that has already loaded their modules, so that the second run of a demo starts at once. A
process ends with the one that started it, even if that is killed. It reports over a pipe how it ends.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from evener.launch import preload as preloading
from evener.launch.parent import CARRY_ON, STOP, Failed, Parent, Said, Sent, decoder
from evener.system.cores import bind_to, compute_in, keep_to_quota
from evener.system.host import require_posix
from evener.system.process_exit import (
    exit_with_parent,
    folder_for_sockets,
    kill_with_starter,
    put_worker_sockets_into,
)
from evener.system.signals import STOP_SIGNALS, outlive_terminal, set_handler

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess  # which Windows does not have

RANK_MODULES = ("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "evener.training.rank")
"""Modules of every rank, imported once for all of them. Optimizers import `torch._dynamo`, which takes two seconds."""
_SERVER = "evener.launch.fork_server"


@dataclass
class LocalProcess:
    """A process that this one started.

    Attributes:
        has_finished: whether it reported the end of its work.
        said: messages to the coordinator that it has not read.
        is_drained: whether all its messages were read.
        failure: reported failure; None without one.
        stop: marks a SIGTERM as one of this process.
        given_up: why this process killed it; empty if it did not.
    """

    process: ForkServerProcess
    pipe: Connection
    stop: Connection
    has_finished: bool = False
    is_drained: bool = False
    said: deque[bytes] = field(default_factory=deque)
    failure: Failed | None = None
    given_up: str = ""

    def read(self) -> list[bytes]:
        """Process all messages in its pipe; return those that were sent to this process."""
        sent = []
        try:
            while self.pipe.poll():
                message = decoder.decode(self.pipe.recv_bytes())
                if isinstance(message, Sent):
                    sent.append(message.data)
                elif isinstance(message, Said):
                    self.said.append(message.data)
                elif isinstance(message, Failed):
                    self.failure = message
                else:
                    self.has_finished = True
        except (EOFError, OSError):
            self.is_drained = True
        return sent

    def tell(self, data: bytes) -> None:
        """Send a message of the coordinator; a process that has ended ignores it."""
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(data)

    def request_stop(self) -> None:
        """Ask the process to stop, if it runs; see `Parent.on_stop`."""
        if self.process.pid is not None and not self.has_ended:
            with contextlib.suppress(OSError):
                self.stop.send_bytes(STOP)
            os.kill(self.process.pid, signal.SIGTERM)

    def carry_on(self) -> None:
        """Let the process ignore a SIGTERM that has reached it together with this one; see `Parent.on_stop`."""
        with contextlib.suppress(OSError):
            self.stop.send_bytes(CARRY_ON)

    def give_up(self, why: str) -> None:
        """Kill the process; `why` is a clause that explains it."""
        self.given_up = why
        self.process.kill()

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, for any reason."""
        return not self.process.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether the process reported a failure, or ended without a report."""
        return self.failure is not None or (self.has_ended and not self.has_finished)

    @property
    def ending(self) -> str:
        """How the process ended, for the user: the reason of its kill, a signal, or its exit code."""
        if self.given_up:
            return self.given_up
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"ended with exit code {code}"


class LocalProcesses:
    """The processes of one launch: a context that ends them all.

    Args:
        preload: modules that the server of the processes loads; only the first launch of a command decides.

    Raises:
        InvalidInput: this system has no POSIX.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        require_posix("starting several processes on one machine")
        self._context = multiprocessing.get_context("forkserver")
        self._folder = os.path.join(folder_for_sockets(), f"evener-{secrets.token_hex(8)}")
        is_main = threading.current_thread() is threading.main_thread()
        self._context.set_forkserver_preload([*([_SERVER] if is_main else []), preloading.__name__])
        with _stop_signals_are_blocked():
            resource_tracker.ensure_running()  # here, for it lets Ctrl-C through when it has started
        modules = _variable(preloading.NAMES, ",".join(preload))
        with _stop_signals_are_blocked(), _without_main(), _without_socket_file(), modules:
            forkserver.ensure_running()  # it ignores Ctrl-C itself, but only when it has loaded all that
        self._started: list[LocalProcess] = []

    def start(
        self,
        name: str,
        target: Callable[..., None],
        *arguments: Any,
        cores: Sequence[int] = (),
        threads: int | None = None,
    ) -> LocalProcess:
        """Start a process.

        Args:
            name: that tools of the system show.
            target: function of its `Parent` and the `arguments`, of a module that can be imported.
            arguments: plain values and functions. The program that was started is loaded again in the process if
                something in them is defined in it, and only then.
            cores: of the processor that it runs on; empty for all.
            threads: that one operation may use; None for the libraries' defaults.
        """
        ours, theirs = self._context.Pipe()
        heard, stop = self._context.Pipe(duplex=False)
        main_arguments = (target, arguments, tuple(cores), threads, theirs, heard, self._folder)
        process = self._context.Process(target=_main, args=main_arguments, name=name)
        with contextlib.nullcontext() if _needs_main((target, *arguments)) else _without_main():
            process.start()
        theirs.close()
        heard.close()
        self._started.append(LocalProcess(process, ours, stop))
        return self._started[-1]

    def receive(self, timeout: float) -> list[tuple[LocalProcess, bytes]]:
        """All that processes have sent; returns early when one of them says or does anything.

        Args:
            timeout: seconds to wait for it.
        """
        talking = {one.pipe: one for one in self._started if not one.is_drained}
        sentinels = [one.process.sentinel for one in self._started if not one.has_ended]
        received = []
        for ready in wait([*talking, *sentinels], timeout):
            one = talking.get(ready)  # type: ignore[call-overload]
            if one is not None:
                received += [(one, data) for data in one.read()]
        return received

    def request_stop(self) -> None:
        """Ask all that run to end."""
        for one in self._started:
            one.request_stop()

    def end(self, one: LocalProcess) -> None:
        """End one of them at once, if it has not ended yet, and forget it."""
        self._started.remove(one)
        _close(one)

    def __enter__(self) -> LocalProcesses:
        return self

    def __exit__(self, *_error: object) -> None:
        for one in self._started:
            one.process.kill()
        for one in self._started:
            _close(one)
        shutil.rmtree(self._folder, ignore_errors=True)


def _close(one: LocalProcess) -> None:
    one.process.kill()
    one.process.join()
    one.pipe.close()
    one.stop.close()
    one.process.close()


def _main(
    target: Callable[..., None],
    arguments: Sequence[Any],
    cores: Sequence[int],
    threads: int | None,
    pipe: Connection,
    stop: Connection,
    folder: str,
) -> None:
    """Run the target in a new process.

    Workers of data loaders put sockets into `folder`, which the starter removes, since killed processes cannot. Ctrl-C
    and the end of the terminal are handled by the user's command, which stops this process by SIGTERM.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_handler(signal.SIGHUP, lambda *_: None)
    outlive_terminal()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # for what this process starts
    put_worker_sockets_into(folder)
    multiprocessing.set_start_method(None, force=True)  # the user's workers start as in a process of the user's own
    parent, error = Parent(pipe, stop), None
    try:
        if preloading.error is not None:
            raise preloading.error
        kill_with_starter()
        exit_with_parent()
        if cores:
            bind_to(cores)
        if threads:
            compute_in(threads)
        else:
            keep_to_quota()
        target(parent, *arguments)
    except BaseException as raised:
        error = raised
    sys.stdout.flush()
    sys.stderr.flush()
    parent.end(error)


class _MainFinder(pickle.Pickler):
    """A pickler that detects functions and classes of the main program.

    Attributes:
        found: whether there was one.
    """

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.found = False

    def reducer_override(self, value: object) -> Any:
        """Inspect functions and classes, without changing how they are pickled."""
        self.found |= isinstance(value, type | FunctionType) and value.__module__ == "__main__"
        return NotImplemented


def _needs_main(values: Sequence[Any]) -> bool:
    finder = _MainFinder()
    finder.dump(values)
    return finder.found


@contextmanager
def _stop_signals_are_blocked() -> Iterator[None]:
    """Block signals to all processes of a terminal or a service, also in processes started inside until they unblock.

    A server that ended by such a signal could not report how its processes end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment inside."""
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module inside, so that new processes do not run the user's program again.

    A program that calls `evener.train` would start itself without end, and a notebook has no file to run.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _without_socket_file() -> Iterator[None]:
    """Let a fork server start inside whose socket has no file afterwards, on Linux.

    The socket would lie in a folder that Python removes at the end of a process, but not of one that is killed.
    """
    if sys.platform != "linux":
        yield
        return
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    server: Any = forkserver._forkserver
    before = config.get("tempdir")
    with tempfile.TemporaryDirectory(prefix="evener-", dir=folder_for_sockets()) as folder:
        config["tempdir"] = folder
        try:
            yield
            if str(server._forkserver_address).startswith(folder):
                socket = os.open(server._forkserver_address, os.O_PATH | os.O_CLOEXEC)
                server._forkserver_address = f"/proc/self/fd/{socket}"
        finally:
            config["tempdir"] = before
