"""A process's eye on the generations: it beats, listens, and ends itself when it takes part no more.

Two threads do this, as the main one may compute, or wait for other ranks, for long. A process that was frozen wakes up
not knowing what it missed: `fence` lets it change nothing before the authority has answered it again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from evener.membership.generation import Beat, Generation, Hello, ToAuthority, decode_for_process, encode_message
from evener.membership.line import Line
from evener.records.errors import NodeLost
from evener.system.heartbeat import interval

_LEASE = 0.5
"""Of the patience: so long after it sent a beat that was answered, a process has certainly not been given up."""


class Watch:
    """Follows the generations of a run.

    Args:
        line: to the authority.
        on_urgent: called in a thread when ranks of a generation before this one are gone.
        cut_line: returns the error that this process ends with because a line to another one is cut, if one is.

    Attributes:
        step: that this process works on.
        holds: number of the last generation in which this process had the state of the training.
        changed: notified whenever there is news.
        newest: the newest generation; None before the first.
        untold: generations, oldest first, of which nobody has told the user yet.
    """

    def __init__(
        self,
        line: Line,
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

    def start(self, founders: tuple[str, ...]) -> None:
        """Say that this process can take part, and begin to beat and to listen."""
        self._say(Hello(node=self._line.node, founders=founders))
        for run in (self._beat, self._listen):
            threading.Thread(target=run, name=f"evener-elastic{run.__name__}", daemon=True).start()

    def is_broken(self, number: int) -> bool:
        """Whether ranks of generation `number` are gone."""
        return self._urgent > number

    def newer(self, number: int, seconds: float | None = None) -> Generation | None:
        """The newest generation, once it is newer than `number`; None if that takes longer than `seconds`."""
        with self.changed:
            self.changed.wait_for(lambda: self.newest is not None and self.newest.number > number, seconds)
            return self.newest if self.newest is not None and self.newest.number > number else None

    def say_holds(self, number: int) -> None:
        """Say with a beat, now, that this process has the state of the training in generation `number`."""
        self.holds = number
        self._due.set()

    def fence(self) -> None:
        """Return when this process was certainly not given up up to now; a process that was ends here."""
        if time.monotonic() < self._sure_until:
            return
        with self.changed:
            while time.monotonic() >= self._sure_until:
                self._due.set()
                self.changed.wait(interval(self._line.patience))

    def _beat(self) -> None:
        seconds = max(self._line.patience, self._line.absence)
        most = seconds / interval(self._line.patience)
        while self._count - self._answered <= most and not self._is_over.is_set():
            self._sent_at = time.monotonic()
            self._count += 1
            self._say(Beat(count=self._count, step=self.step, holds=self.holds))
            self._due.wait(interval(self._line.patience))
            self._due.clear()
            if (cut := self._cut_line()) is not None:
                self._is_over.set()
                self._line.end(cut)
        self._end(f"does not hear from the authority of the run for {seconds:g} s")

    def _listen(self) -> None:
        while not self._is_over.is_set():
            try:
                message = decode_for_process(self._line.receive())
            except (EOFError, OSError):
                self._end("does not hear from the authority of the run any more")
                return
            with self.changed:
                if isinstance(message, Generation):
                    self._begin(message)
                elif message.count == self._count:
                    self._answered, self._sure_until = message.count, self._sent_at + _LEASE * self._line.patience
                self.changed.notify_all()

    def _begin(self, generation: Generation) -> None:
        if generation.rank_of(self._line.process) is None:
            self._end("was given up by the run: it was silent for too long")
            return
        self.newest = generation
        self.untold.append(generation)
        if generation.is_urgent:
            self._urgent = generation.number
            self._on_urgent(generation)

    def _say(self, message: ToAuthority) -> None:
        try:
            self._line.send(encode_message(message))
        except OSError:
            self._end("does not reach the authority of the run any more")

    def _end(self, why: str) -> None:
        """End this process, once."""
        if not self._is_over.is_set():
            self._is_over.set()
            self._line.end(NodeLost(f"node {self._line.node} {why}", (self._line.node,)))
