"""Probe of the lines from a joining process to the processes of a run, before any of these waits for it.

    every process        listens, and publishes its port
    a joining process    connects to every process that the coordinator names; the kernel there answers, so the other
                         process goes on computing

Only connections are made. No data are sent, so a stranger that connects learns nothing. A thread accepts and closes
every connection at once, whoever made it: what strangers leave is gone after `_REST_S`, and they take no place of a
joining process, whose kernel tries again meanwhile.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from evener.comm.endpoints import endpoint_of, publish_endpoint
from evener.membership.generation import Probe, ReachedPeers
from evener.records.errors import EvenerError, LineCut, NodeLost

_BACKLOG = 1024
"""Connections that the kernel answers before the thread accepts them."""
_REST_S = 0.05
"""Pause between two rounds of accepting, which bounds the time that a flood of connections takes from this process."""
_PAUSE_S, _ATTEMPT_S = 0.2, 2.0
"""Pause between two attempts, and the longest one: after that another one is sooner answered than the kernel's own."""


class LineProbe:
    """The end of a process's lines where others probe them, and its own probes.

    Args:
        node: of this process.
        process: number of this process.
        address: of this machine, at which the other processes reach it.
        open_store: opens a connection to the rendezvous store.
        seconds: for which a process may be out of reach.
        report: called in a thread with the processes that were reached.
        give_way: called in a thread with the error of a line that is cut; it ends this process.
    """

    def __init__(
        self,
        *,
        node: str,
        process: int,
        address: str,
        open_store: Callable[[], Any],
        seconds: float,
        report: Callable[[ReachedPeers], None],
        give_way: Callable[[EvenerError], None],
    ) -> None:
        self._node, self._process, self._address, self._open_store = node, process, address, open_store
        self._seconds, self._report, self._give_way = seconds, report, give_way
        self._server: socket.socket | None = None
        self._newest: Probe | None = None
        self._is_closed = threading.Event()

    def listen(self) -> None:
        """Let other processes reach this one."""
        self._server = socket.create_server((self._address, 0), backlog=_BACKLOG)
        self._server.setblocking(False)
        threading.Thread(target=self._answer, args=(self._server,), name="evener-elastic-line", daemon=True).start()
        publish_endpoint(self._open_store(), f"line/{self._process}", self._address, self._server)

    def begin(self, probe: Probe) -> None:
        """Probe the lines to these processes in the background, instead of those that were named before."""
        self._newest = probe
        threading.Thread(target=self._run, args=(probe,), name="evener-elastic-probe", daemon=True).start()

    def stop(self) -> None:
        """End the probes."""
        self._newest = None

    def close(self) -> None:
        """End the probes, and stop listening."""
        self.stop()
        self._is_closed.set()
        if self._server is not None:
            with suppress(OSError):  # this wakes the thread, which closes it
                self._server.shutdown(socket.SHUT_RDWR)

    def _answer(self, server: socket.socket) -> None:
        """Close the connections that other processes, or strangers, make to this one."""
        waiting = select.poll()
        waiting.register(server, select.POLLIN)
        with server:
            while not self._is_closed.is_set():
                waiting.poll()
                with suppress(OSError):  # there are no more, or too many files are open
                    for _ in range(_BACKLOG):
                        server.accept()[0].close()
                self._is_closed.wait(_REST_S)

    def _run(self, probe: Probe) -> None:
        try:
            for process, node in probe.nodes.items():
                self._reach(process, node, probe)
        except EvenerError as error:
            if self._newest is probe:
                self._give_way(error)
        except RuntimeError:  # the store is gone; the process ends since it does not hear the coordinator
            return
        else:
            if self._newest is probe:
                self._report(ReachedPeers(processes=tuple(probe.nodes)))

    def _reach(self, process: int, node: str, probe: Probe) -> None:
        """Connect to another process.

        Raises:
            LineCut: it cannot be reached.
            NodeLost: the probe is over, or the other process has published no address.
        """
        store = self._open_store().until(lambda: self._newest is not probe)
        host, port = endpoint_of(store, f"line/{process}", node)
        deadline = time.monotonic() + self._seconds
        while self._newest is probe:
            seconds = min(_ATTEMPT_S, max(_PAUSE_S, deadline - time.monotonic()))
            try:
                socket.create_connection((host, port), timeout=seconds).close()
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise LineCut(
                        f"node {self._node} does not reach node {node} at {host}:{port} ({error.strerror or error}): "
                        "check the network and the firewalls between them",
                        (self._node,),
                    ) from error
                time.sleep(_PAUSE_S)
            else:
                return
        raise NodeLost("the probe of the lines was ended")
