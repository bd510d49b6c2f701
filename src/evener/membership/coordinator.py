"""The rule of membership in an elastic run. Pure: time is an argument, and the result is a generation or None.

A process that has ended (which `RankSupervisor` sees), or was silent for the patience, is lost for good, and the next
generation excludes it. The last holder of the state of the training is given up after eight patiences only, because the
run ends with it.

A joining process first has to reach all others, so that no rank waits for one whose line to another is cut. It waits
for a moment, so that several join in one generation, and enters after a step. Later ones wait until that generation has
begun, so that no rank waits for others that already moved to the next.

A process that leaves on notice finishes its step, as do the others; the next generation excludes it. Several leave one
after the other, as the others may need a step in between to copy what a rank alone holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from evener.membership.generation import Beat, Generation, Hello, Participant
from evener.system.heartbeat import ListenedSeconds, Progress

JOIN_SECONDS = 0.2
"""Seconds that a joining process waits for others, so that the ranks reconnect only once."""

LAST_HOLDER = 8
"""Patiences of silence after which the last holder of the state of the training is lost."""
_NO_BEAT = Beat(count=0, step=0, holds=0)


@dataclass(slots=True)
class _Process:
    """The coordinator's view of a process: its node, its beats, and the processes that it reaches."""

    hello: Hello
    came: float
    progress: Progress
    beat: Beat = _NO_BEAT
    reached: set[int] = field(default_factory=set)


class Coordinator:
    """The membership of one run.

    Args:
        patience: seconds of silence after which a process is lost.

    Attributes:
        generation: the newest; None before all initial ranks have joined.
        awaited: silent processes that the run waits for, as no other process holds the state.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._processes: dict[int, _Process] = {}
        self._lost: dict[int, str] = {}
        self._fed: set[int] = set()  # processes that may hold the state without having reported it
        self._listened = ListenedSeconds(patience, 0.0)
        self._may_have_trained = False
        self._leaving: set[int] = set()  # processes to release
        self._left: set[int] = set()  # those whose last step may not be over
        self._left_too_early: list[int] = []  # those that were lost in it, until the next generation
        self._idle: dict[int, float] = {}
        self.awaited: tuple[int, ...] = ()
        self.generation: Generation | None = None

    def resume(self, generation: Generation | None, given_up: Iterable[int], now: float, absence: float = 0.0) -> None:
        """Continue a run whose coordinator was killed, from its newest generation, if any.

        Args:
            generation: the newest.
            given_up: lost processes.
            now: the time.
            absence: seconds within which the other processes have to be heard, if more than the patience.
        """
        self._listened = ListenedSeconds(self._patience, now)
        heard = max(0.0, absence - self._patience)
        for process in given_up:
            self.lose(process, "was given up")
        self.generation = generation
        self._may_have_trained = generation is not None
        for one in () if generation is None else generation.participants:
            self._processes[one.process] = _Process(Hello(node=one.node), now, Progress(heard))
            self._fed.add(one.process)

    def arrive(self, process: int, hello: Hello, now: float) -> None:
        """Add a process; one that was lost is ignored."""
        if process not in self._lost:
            self._processes[process] = _Process(hello, now, Progress(self._listened.seconds))

    def hear(self, process: int, beat: Beat) -> None:
        """Record a beat of a process."""
        if process in self._processes:
            self._processes[process].beat = beat

    def reach(self, process: int, others: Iterable[int]) -> None:
        """Record that a joining process reaches these others."""
        if process in self._processes:
            self._processes[process].reached.update(others)

    def to_reach(self, process: int) -> dict[int, str]:
        """Return the processes that a joining `process` has to reach, with their nodes.

        These are the participants, and the processes that joined before it. Others have nothing to reach.
        """
        if self.generation is None or process not in self._waiting:
            return {}
        others = [one.process for one in self.generation.participants if one.process not in self._lost]
        others += [other for other in self._waiting if other < process]
        return {other: self.name_of(other) for other in others}

    def lose(self, process: int, why: str) -> None:
        """Remove a process for good."""
        self._lost.setdefault(process, why)
        if process in self._left:  # the others may wait for it in their last common step
            self._left.remove(process)
            self._left_too_early.append(process)

    def release(self, process: int) -> None:
        """Let a process go after a step, once another one holds the state of the training."""
        self._leaving.add(process)

    @property
    def outgoing(self) -> set[int]:
        """Processes that a generation excludes because they leave on notice, and that may still finish their step."""
        return set(self._left)

    def is_lost(self, process: int) -> bool:
        """Whether the run continues without this process."""
        return process in self._lost

    def holds_state(self, process: int) -> bool:
        """Whether `process` takes part and holds the state of the training."""
        present = () if self.generation is None else self.generation.participants
        return any(
            one.process == process and (one.since == 1 or self._processes[process].beat.holds) for one in present
        )

    def is_last_holder(self, process: int) -> bool:
        """Whether `process` holds the state of the training, and no other holder was heard within the patience."""
        others = (other for other in self._processes if other != process and other not in self._lost)
        return self.holds_state(process) and not any(
            self.holds_state(other) and self._idle.get(other, 0.0) <= self._patience for other in others
        )

    def name_of(self, process: int) -> str:
        """Return the node of a process that has joined."""
        return self._processes[process].hello.node

    @property
    def has_trained(self) -> bool:
        """Whether a step may be complete; a process that reported none works at most on the first."""
        return self._may_have_trained or any(one.beat.step > 1 for one in self._processes.values())

    @property
    def is_computing(self) -> bool:
        """Whether the first rank of the newest generation has its state, so that its published values are current."""
        if self.generation is None or not self.generation.participants:
            return False
        return self._processes[self.generation.participants[0].process].beat.holds >= self.generation.number

    @property
    def has_state(self) -> bool:
        """Whether a process holds the state of the training, or training has not begun."""
        generation = self.generation
        return generation is None or any(self.holds_state(one.process) for one in generation.participants)

    @property
    def may_have_state(self) -> bool:
        """Whether a process may hold the state without having reported it."""
        generation = self.generation
        return generation is None or any(one.process in self._fed for one in generation.participants)

    def decide(self, now: float) -> Generation | None:
        """Return the next generation, if it is time for one."""
        self._give_up_silent(now)
        if self.generation is None:
            return self._first()
        present = self.generation.participants
        stays = [one for one in present if one.process not in self._lost]
        number = self.generation.number + 1
        gone = [one for one in present if one.process in self._lost]
        gone += [Participant(process=p, node=self.name_of(p), since=number) for p in self._left_too_early]
        self._left_too_early = []
        new = self._newcomers(now, is_urgent=bool(gone)) if gone or self.is_computing else []
        left = self._next_to_leave(present) if self.is_computing and not gone else []
        if not gone and not new and not left:
            return None
        stays = [one for one in stays if one not in left]
        self._left |= {one.process for one in left}
        joined = [Participant(process=p, node=self._processes[p].hello.node, since=number) for p in new]
        reasons = [f"{one.node} {self._lost[one.process]}" for one in gone]
        reasons += [f"{one.node} came" for one in joined] + [f"{one.node} left on notice" for one in left]
        return self._make(number, (*stays, *joined), reasons, gone, joined, left)

    def _next_to_leave(self, present: Sequence[Participant]) -> list[Participant]:
        """Return the participant that may leave now, if any; those of the last generation are gone."""
        for process in self._leaving.difference(one.process for one in present):
            self._left.discard(process)  # the others compute without it
            self.lose(process, "left on notice")
        for one in present:
            others = (other.process for other in present if other is not one)
            if one.process in self._leaving and any(map(self.holds_state, others)):
                return [one]
        return []

    def _make(
        self,
        number: int,
        participants: tuple[Participant, ...],
        reasons: list[str],
        gone: list[Participant],
        joined: list[Participant],
        left: Sequence[Participant] = (),
    ) -> Generation:
        self.generation = Generation(
            number=number,
            participants=participants,
            reason=", ".join(reasons),
            is_urgent=bool(gone),
            lost=tuple(one.node for one in gone),
            joined=tuple(one.node for one in joined),
            left=tuple(one.node for one in left),
        )
        if number == 1 or self.may_have_state:
            self._fed |= {one.process for one in participants}
        return self.generation

    def _first(self) -> Generation | None:
        """Return the first generation, in the order of the initial ranks, once all of them have joined."""
        come = {one.hello.node: process for process, one in self._processes.items()}
        initial_nodes = next((one.hello.initial_nodes for one in self._processes.values()), ())
        if not initial_nodes or not all(node in come for node in initial_nodes):
            return None
        first = tuple(Participant(process=come[node], node=node, since=1) for node in initial_nodes)
        return self._make(1, first, ["the run began"], [], [])

    def _newcomers(self, now: float, *, is_urgent: bool) -> list[int]:
        """Return the processes outside the generation, if it is time to add them."""
        assert self.generation is not None
        waiting = [p for p in self._waiting if self._processes[p].reached.issuperset(self.to_reach(p))]
        since = [now - self._processes[p].came for p in waiting]
        return waiting if is_urgent or (since and min(since) >= JOIN_SECONDS) else []

    @property
    def _waiting(self) -> list[int]:
        """The processes outside the generation that are not lost and do not leave."""
        inside = {one.process for one in self.generation.participants} if self.generation is not None else set[int]()
        return [p for p in sorted(self._processes) if p not in inside | self._leaving and p not in self._lost]

    def _give_up_silent(self, now: float) -> None:
        """Remove processes that were silent while the coordinator listened; its own pauses do not count."""
        listened = self._listened.at(now)
        for process, one in self._processes.items():
            self._idle[process] = one.progress.idle_seconds(one.beat.count, now=listened)
        if any(self._idle[process] <= self._patience for process in self.awaited):
            for process in self.awaited:  # processes that were stopped together follow the first within the patience
                if self._idle[process] > self._patience:
                    self._processes[process].progress, self._idle[process] = Progress(listened), 0.0
        silent = [p for p in self._processes if self._idle[p] > self._patience and p not in self._lost]
        last = [process for process in silent if self.is_last_holder(process)]
        self.awaited = tuple(p for p in last if self._idle[p] <= LAST_HOLDER * self._patience)
        for process in silent:
            if process not in self.awaited:
                seconds = self._patience * (LAST_HOLDER if process in last else 1)
                self.lose(process, f"has been silent for {seconds:g} s, at step {self._processes[process].beat.step}")
