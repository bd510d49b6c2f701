"""Decides who takes part in an elastic run. Pure: time is an argument, and a generation comes out, or none.

A process that has ended, or has been silent for the patience, is given up at once and for good: the next generation is
without it. The last process that holds the state of the training may be silent for longer, as the run ends with it. One
that has come waits a moment, so that several come in one generation, and is taken in after a step. Who comes later
waits until that generation has begun: nobody may wait there for those who go to the next one at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from evener.membership.generation import Beat, Generation, Hello, Participant
from evener.system.heartbeat import Progress

JOIN_SECONDS = 0.2
"""For which a process that has come waits for others, so that survivors make room once."""

LAST_HOLDER = 8
"""Patiences of silence after which the last process that holds the state of the training is given up."""
_LONGEST_LOOK = 0.25
"""Of the patience, that the time between two looks counts at most: a machine that was stopped stopped all alike."""
_NO_BEAT = Beat(count=0, step=0, holds=0)


@dataclass(slots=True)
class _Process:
    """What the authority knows of a process: its node, its beats, and the generation whose state it holds."""

    hello: Hello
    came: float
    progress: Progress
    beat: Beat = _NO_BEAT


class Authority:
    """Who takes part in one run.

    Args:
        patience: seconds of silence after which a process is given up.

    Attributes:
        generation: the newest; None before all founders have come.
        awaited: processes that have been silent for the patience and are waited for, as nobody else holds the state.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._processes: dict[int, _Process] = {}
        self._lost: dict[int, str] = {}
        self._fed: set[int] = set()
        self._listened, self._looked = 0.0, 0.0
        self._may_have_trained = False
        self._idle: dict[int, float] = {}
        self.awaited: tuple[int, ...] = ()
        self.generation: Generation | None = None

    def resume(self, generation: Generation | None, given_up: Iterable[int], now: float, absence: float = 0.0) -> None:
        """Go on with a run whose authority was killed, from its newest generation, if it had one.

        Args:
            generation: the newest.
            given_up: processes that the run goes on without.
            now: the time.
            absence: seconds in which the others have to be heard, if that is more than the patience.
        """
        self._looked = now
        heard = self._listened + max(0.0, absence - self._patience)
        for process in given_up:
            self.lose(process, "was given up")
        self.generation = generation
        self._may_have_trained = generation is not None
        for one in () if generation is None else generation.participants:
            self._processes[one.process] = _Process(Hello(node=one.node), now, Progress(heard))
            self._fed.add(one.process)

    def arrive(self, process: int, hello: Hello, now: float) -> None:
        """`process` can take part; one that was given up never can again."""
        if process not in self._lost:
            self._processes[process] = _Process(hello, now, Progress(self._listened))

    def hear(self, process: int, beat: Beat) -> None:
        """`process` lives."""
        if process in self._processes:
            self._processes[process].beat = beat

    def lose(self, process: int, why: str) -> None:
        """`process` is gone, for good."""
        self._lost.setdefault(process, why)

    def has_given_up(self, process: int) -> bool:
        """Whether `process` is out, for good."""
        return process in self._lost

    def holds_state(self, process: int) -> bool:
        """Whether `process` takes part, and holds the state of the training."""
        present = () if self.generation is None else self.generation.participants
        return any(
            one.process == process and (one.since == 1 or self._processes[process].beat.holds) for one in present
        )

    def is_last_holder(self, process: int) -> bool:
        """Whether `process` holds the state of the training, and no other that does has been heard in the patience."""
        others = (other for other in self._processes if other != process and other not in self._lost)
        return self.holds_state(process) and not any(
            self.holds_state(other) and self._idle.get(other, 0.0) <= self._patience for other in others
        )

    def name_of(self, process: int) -> str:
        """The node of a process that has come."""
        return self._processes[process].hello.node

    @property
    def has_trained(self) -> bool:
        """Whether a step may have been made; who has said nothing of one yet, works on the first at most."""
        return self._may_have_trained or any(one.beat.step > 1 for one in self._processes.values())

    @property
    def is_settled(self) -> bool:
        """Whether the first of the newest generation has its state, so that what it left for others is of now."""
        if self.generation is None or not self.generation.participants:
            return False
        return self._processes[self.generation.participants[0].process].beat.holds >= self.generation.number

    @property
    def has_state(self) -> bool:
        """Whether somebody holds the state of the training, or nobody ever did."""
        generation = self.generation
        return generation is None or any(self.holds_state(one.process) for one in generation.participants)

    @property
    def may_have_state(self) -> bool:
        """Whether somebody may hold the state who has not said so: it was in a generation with one who did."""
        generation = self.generation
        return generation is None or any(one.process in self._fed for one in generation.participants)

    def decide(self, now: float) -> Generation | None:
        """The next generation, if it is time for one."""
        self._give_up_silent(now)
        if self.generation is None:
            return self._found()
        present = self.generation.participants
        stays = [one for one in present if one.process not in self._lost]
        number = self.generation.number + 1
        gone = [one for one in present if one.process in self._lost]
        new = self._newcomers(now, is_urgent=bool(gone)) if gone or self.is_settled else []
        if not gone and not new:
            return None
        joined = [Participant(process=p, node=self._processes[p].hello.node, since=number) for p in new]
        reasons = [f"{one.node} {self._lost[one.process]}" for one in gone]
        reasons += [f"{one.node} came" for one in joined]
        return self._make(number, (*stays, *joined), reasons, gone, joined)

    def _make(
        self,
        number: int,
        participants: tuple[Participant, ...],
        reasons: list[str],
        gone: list[Participant],
        joined: list[Participant],
    ) -> Generation:
        self.generation = Generation(
            number=number,
            participants=participants,
            reason=", ".join(reasons),
            is_urgent=bool(gone),
            lost=tuple(one.node for one in gone),
            joined=tuple(one.node for one in joined),
        )
        if number == 1 or self.may_have_state:
            self._fed |= {one.process for one in participants}
        return self.generation

    def _found(self) -> Generation | None:
        """The first generation, in the order that the founders name, once all of them have come."""
        come = {one.hello.node: process for process, one in self._processes.items()}
        founders = next((one.hello.founders for one in self._processes.values()), ())
        if not founders or not all(node in come for node in founders):
            return None
        first = tuple(Participant(process=come[node], node=node, since=1) for node in founders)
        return self._make(1, first, ["the run began"], [], [])

    def _newcomers(self, now: float, *, is_urgent: bool) -> list[int]:
        """Processes that have come and are not in yet, if it is time to take them in."""
        assert self.generation is not None
        inside = {one.process for one in self.generation.participants}
        waiting = [p for p in sorted(self._processes) if p not in inside and p not in self._lost]
        since = [now - self._processes[p].came for p in waiting]
        return waiting if is_urgent or (since and min(since) >= JOIN_SECONDS) else []

    def _give_up_silent(self, now: float) -> None:
        """Who has been silent while somebody listened: what the authority slept through is nobody's silence."""
        self._listened += min(now - self._looked, _LONGEST_LOOK * self._patience)
        self._looked = now
        for process, one in self._processes.items():
            self._idle[process] = one.progress.idle_seconds(one.beat.count, now=self._listened)
        if any(self._idle[process] <= self._patience for process in self.awaited):
            for process in self.awaited:  # those that were stopped together have the patience to follow the first
                if self._idle[process] > self._patience:
                    self._processes[process].progress, self._idle[process] = Progress(self._listened), 0.0
        silent = [p for p in self._processes if self._idle[p] > self._patience and p not in self._lost]
        last = [process for process in silent if self.is_last_holder(process)]
        self.awaited = tuple(p for p in last if self._idle[p] <= LAST_HOLDER * self._patience)
        for process in silent:
            if process not in self.awaited:
                seconds = self._patience * (LAST_HOLDER if process in last else 1)
                self.lose(process, f"has been silent for {seconds:g} s, at step {self._processes[process].beat.step}")
