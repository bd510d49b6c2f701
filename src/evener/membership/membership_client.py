"""A process's client of the coordinator: it beats, listens, and ends the process when the run drops it.

Two threads do this, because the main thread may compute or wait for other ranks for a long time. After a process was
stopped and continued, `fence` keeps it from any change until the coordinator has answered it again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from evener.membership.control_channel import ControlChannel
from evener.membership.generation import (
    Beat,
    Generation,
    Hello,
    Probe,
    ToCoordinator,
    decode_for_process,
    encode_message,
)
from evener.membership.line_probe import LineProbe
from evener.records.errors import EvenerError, NodeLost
from evener.system.heartbeat import interval

_LEASE = 0.5
"""Fraction of the patience after an answered beat within which the process is certainly not lost."""


class MembershipClient:
    """The generations of a run, as one process receives them.

    Args:
        line: control channel to the coordinator.
        address: of this machine, at which the other processes reach it.
        on_urgent: called in a thread with a generation that begins because ranks are lost.
        cut_line: returns the error of this process if its connection to another one is broken.

    Attributes:
        step: current step of this process.
        holds: number of the last generation in which this process held the state of the training.
        changed: notified of every message.
        newest: the newest generation; None before the first.
        untold: generations that the user has not seen, oldest first.
    """

    def __init__(
        self,
        line: ControlChannel,
        address: str,
        on_urgent: Callable[[Generation], None],
        cut_line: Callable[[], NodeLost | None] = lambda: None,
    ) -> None:
        self._line, self._on_urgent, self._cut_line = line, on_urgent, cut_line
        self.step = self.holds = 0
        self.changed = threading.Condition()
        self.newest: Generation | None = None
        self.untold: list[Generation] = []
        self._urgent = 0
        self._count = self._answered = 0
        self._sent_at = self._sure_until = 0.0
        self._due, self._is_over = threading.Event(), threading.Event()
        self._probe = LineProbe(
            node=line.node,
            process=line.process,
            address=address,
            open_store=line.open_store,
            seconds=line.patience,
            report=self._say,
            give_way=self._give_way,
        )

    def start(self, initial_nodes: tuple[str, ...]) -> None:
        """Report that this process can take part, and begin to beat and to listen."""
        self._probe.listen()
        self._say(Hello(node=self._line.node, initial_nodes=initial_nodes))
        for run in (self._beat, self._listen):
            threading.Thread(target=run, name=f"evener-elastic{run.__name__}", daemon=True).start()

    def is_broken(self, number: int) -> bool:
        """Whether ranks of generation `number` are lost."""
        return self._urgent > number

    def newer(self, number: int, seconds: float | None = None) -> Generation | None:
        """Wait for a generation after `number` and return the newest; None after `seconds` without one."""
        with self.changed:
            self.changed.wait_for(lambda: self.newest is not None and self.newest.number > number, seconds)
            return self.newest if self.newest is not None and self.newest.number > number else None

    def say_holds(self, number: int) -> None:
        """Report with a beat, at once, that this process holds the state of the training in generation `number`."""
        self.holds = number
        self._due.set()

    def fence(self) -> None:
        """Return when this process was certainly not lost until now; a lost process ends here."""
        if time.monotonic() < self._sure_until:
            return
        with self.changed:
            while time.monotonic() >= self._sure_until:
                self._due.set()
                self.changed.wait(interval(self._line.patience))

    def _beat(self) -> None:
        seconds = max(self._line.patience, self._line.absence)
        max_unanswered = seconds / interval(self._line.patience)
        while self._count - self._answered <= max_unanswered and not self._is_over.is_set():
            self._sent_at = time.monotonic()
            self._count += 1
            self._say(Beat(count=self._count, step=self.step, holds=self.holds))
            self._due.wait(interval(self._line.patience))
            self._due.clear()
            self._probe.drain()
            if (cut := self._cut_line()) is not None:
                self._give_way(cut)
        self._probe.close()
        self._end(f"received nothing from the coordinator of the run for {seconds:g} s")

    def _listen(self) -> None:
        while not self._is_over.is_set():
            try:
                message = decode_for_process(self._line.receive())
            except (EOFError, OSError):
                self._end("lost the connection to the coordinator of the run")
                return
            with self.changed:
                if isinstance(message, Generation):
                    self._begin(message)
                elif isinstance(message, Probe):
                    self._probe.begin(message)
                elif message.count == self._count:
                    self._answered, self._sure_until = message.count, self._sent_at + _LEASE * self._line.patience
                self.changed.notify_all()

    def _begin(self, generation: Generation) -> None:
        if generation.rank_of(self._line.process) is None:
            self._end("was dropped by the run: it did not respond in time")
            return
        self.newest = generation
        self._probe.stop()
        self.untold.append(generation)
        if generation.is_urgent:
            self._urgent = generation.number
            self._on_urgent(generation)

    def _say(self, message: ToCoordinator) -> None:
        try:
            self._line.send(encode_message(message))
        except OSError:
            self._end("cannot reach the coordinator of the run")

    def _give_way(self, cut: EvenerError) -> None:
        """End this process, since its line to another is cut."""
        self._is_over.set()
        self._line.end(cut)

    def _end(self, why: str) -> None:
        """End this process, once."""
        if not self._is_over.is_set():
            self._is_over.set()
            self._line.end(NodeLost(f"node {self._line.node} {why}", (self._line.node,)))
