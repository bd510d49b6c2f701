"""The supervisor of an elastic run's ranks: it reports their beats and ends to the `Coordinator`, and replaces lost
processes, local or remote.

It runs in the command that started local ranks, which sees them end, or at the master, to which nodes report their
ends. It receives the beats of the others. Its `Coordinator` is the only object that creates generations
(`evener.membership.coordinator`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from evener.membership.coordinator import LAST_HOLDER, Coordinator
from evener.membership.generation import (
    Generation,
    Heard,
    Hello,
    Probe,
    ReachedPeers,
    decode_for_coordinator,
    encode_message,
)
from evener.records.errors import NodeLost

_MIN_PAUSE_S, _MAX_PAUSE_S = 0.5, 10.0
"""Pause before a restart on a node whose processes end repeatedly without having taken part."""


class Failure(Protocol):
    """A failure as reported by a process."""

    @property
    def is_own(self) -> bool:
        """Whether the error arose in this process, not from the loss of another."""
        ...

    @property
    def sentence(self) -> str:
        """The message for the user."""
        ...


class RankProcess(Protocol):
    """A process of a node, here or on another machine, as seen by the supervisor."""

    @property
    def said(self) -> deque[bytes]:
        """Messages to the coordinator that it has not read."""
        ...

    @property
    def failure(self) -> Failure | None:
        """The reported failure; None without one."""
        ...

    @property
    def has_finished(self) -> bool:
        """Whether the process reported the end of its work."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, for any reason."""
        ...

    @property
    def is_drained(self) -> bool:
        """Whether all its messages were read."""
        ...

    @property
    def has_failed(self) -> bool:
        """Whether the process reported a failure, or ended without a report."""
        ...

    @property
    def ending(self) -> str:
        """How the process ended, for the user."""
        ...

    def tell(self, data: bytes) -> None:
        """Send a message of the coordinator; a process that has ended ignores it."""
        ...


P = TypeVar("P", bound=RankProcess)


@dataclass
class _Post:
    """A node and its current process.

    Attributes:
        rank: of the node at the start of the run.
        number: of the process.
        failures: number of consecutive processes that ended here before they took part.
        due: earliest start of the next one.
        asked: the processes that it was last asked to reach.
    """

    rank: int
    number: int
    failures: int = 0
    due: float = 0.0
    asked: dict[int, str] = field(default_factory=dict)


class RankSupervisor(Generic[P]):
    """The processes of one run, and their replacement.

    Args:
        ranks: the processes that stand for the nodes, by rank at the start; replaced in place.
        patience: seconds of silence after which a process is lost.
        start: starts a process on the node of this rank, with this number.
        can_start: whether a process can start on the node of this rank now.
        first: number of the first process.
        keep: stores every generation before it is sent.
        advice: for the user, if no process remains.
        notify: called with (kind, message, node) of other events.

    Attributes:
        is_stopping: whether the run was asked to stop, so that lost processes are not replaced.
    """

    def __init__(
        self,
        ranks: list[P],
        patience: float,
        start: Callable[[int, int], P],
        can_start: Callable[[int], bool] = lambda _: True,
        first: int = 0,
        keep: Callable[[Generation], None] = lambda _: None,
        advice: str = "; continue from the last checkpoint with --resume",
        notify: Callable[[str, str, str], None] = lambda _kind, _message, _node: None,
    ) -> None:
        self._keep, self._advice, self._notify = keep, advice, notify
        self._awaited: tuple[int, ...] = ()
        self._ranks, self._start, self._can_start = ranks, start, can_start
        self._coordinator, self._patience = Coordinator(patience), patience
        self._posts = [_Post(rank, first + rank) for rank in range(len(ranks))]
        self._next = first + len(ranks)
        self._inside: set[int] = set()
        self._stateless_since: float | None = None
        self.is_stopping = False

    @property
    def has_generation(self) -> bool:
        """Whether all initial ranks have joined."""
        return self._coordinator.generation is not None

    @property
    def has_trained(self) -> bool:
        """Whether a step may be complete."""
        return self._coordinator.has_trained

    @property
    def generation(self) -> Generation | None:
        """The newest generation; None before all initial ranks have joined."""
        return self._coordinator.generation

    @property
    def is_computing(self) -> bool:
        """Whether the newest generation computes again, by its first rank."""
        return self._coordinator.is_computing

    def resume(
        self,
        generation: Generation | None,
        numbers: Sequence[int],
        given_up: Iterable[int],
        next: int,
        absence: float = 0.0,
    ) -> None:
        """Continue a run whose coordinator was killed.

        Args:
            generation: the newest; None before all initial ranks had joined.
            numbers: of the processes, by rank.
            given_up: lost processes among them.
            next: number of the next process.
            absence: seconds within which the processes have to be heard, if more than the patience.
        """
        self._coordinator.resume(generation, given_up, time.monotonic(), absence)
        self._posts = [_Post(rank, number) for rank, number in enumerate(numbers)]
        self._next, self._inside = next, {one.process for one in generation.participants} if generation else set()

    def is_lost(self, rank: P) -> bool:
        """Whether the run continues without this process."""
        number = self._number_of(rank)
        return number is None or self._coordinator.is_lost(number)

    def is_last_holder(self, rank: P) -> bool:
        """Whether this process holds the state of the training, and no other holder is heard."""
        number = self._number_of(rank)
        return number is not None and self._coordinator.is_last_holder(number)

    def release(self, rank: P) -> None:
        """Let this process go after a step, without a loss."""
        if (number := self._number_of(rank)) is not None:
            self._coordinator.release(number)

    def add_node(self) -> None:
        """Start a process on another node, which has joined."""
        rank, number = len(self._ranks), self._next
        self._next += 1
        self._ranks.append(self._start(rank, number))
        self._posts.append(_Post(rank, number))

    def is_needed(self, rank: P) -> bool:
        """Whether the run still needs this process."""
        number = self._number_of(rank)
        if number is not None and self._is_over():  # the others have done all steps
            has_state = self._coordinator.holds_state(number) or number in self._coordinator.outgoing
            return has_state and not (rank.has_failed and rank.failure is None)
        return self.may_speak(rank)

    def ends_the_run(self, rank: P) -> bool:
        """Whether the failure of this process ends the run, instead of the loss of a node."""
        if self._coordinator.generation is None:
            return rank.has_failed
        return rank.failure is not None and rank.failure.is_own and self._number_of(rank) in self._inside

    def may_speak(self, rank: P) -> bool:
        """Whether this process takes part, or finishes its last step, so that its reports belong to the run."""
        generation, number = self._coordinator.generation, self._number_of(rank)
        if generation is None or number is None:
            return generation is None
        return generation.rank_of(number) is not None or number in self._coordinator.outgoing

    def tick(self) -> None:
        """Read all messages, detect lost processes, and act on them. Raises NodeLost if no process holds the state.

        Called after every message or end of a process, and several times a second.
        """
        now = time.monotonic()
        for post in self._posts:
            self._read(post, now)
        if self._is_over():
            return
        for post in self._posts:
            self._see_end(post)
        generation = self._coordinator.decide(now)
        self._tell_awaited()
        if generation is not None:
            self._announce(generation)
        for post in self._posts:
            self._ask_to_reach(post)
        self._require_state(now)
        if self._coordinator.generation is not None and not self.is_stopping:
            for post in self._posts:
                self._replace(post, now)

    def _read(self, post: _Post, now: float) -> None:
        rank = self._ranks[post.rank]
        while rank.said:
            message = decode_for_coordinator(rank.said.popleft())
            if isinstance(message, Hello):
                self._coordinator.arrive(post.number, message, now)
                post.asked = {}
            elif isinstance(message, ReachedPeers):
                self._coordinator.reach(post.number, message.processes)
            else:
                self._coordinator.hear(post.number, message)
                if message.holds:
                    post.failures = 0
                if not self._coordinator.is_lost(post.number):
                    rank.tell(encode_message(Heard(count=message.count)))

    def _is_over(self) -> bool:
        """Whether a rank has done all its work, which implies that all have done all steps."""
        ranks = [self._ranks[post.rank] for post in self._posts]
        return self._coordinator.generation is not None and any(
            rank.has_finished and self.may_speak(rank) for rank in ranks
        )

    def _see_end(self, post: _Post) -> None:
        rank = self._ranks[post.rank]
        if rank.has_ended and rank.is_drained and not rank.has_finished and not self.ends_the_run(rank):
            self._coordinator.lose(post.number, rank.ending if rank.failure is None else rank.failure.sentence)

    def _ask_to_reach(self, post: _Post) -> None:
        """Ask a joining process to reach the others, whenever these have changed."""
        others = self._coordinator.to_reach(post.number)
        if others and others != post.asked:
            self._ranks[post.rank].tell(encode_message(Probe(nodes=others)))
        post.asked = others

    def _announce(self, generation: Generation) -> None:
        """Send the generation to its participants, to those of the previous one, and to those that still leave."""
        self._keep(generation)
        concerned = self._inside | {one.process for one in generation.participants} | self._coordinator.outgoing
        for post in self._posts:
            if post.number in concerned:
                self._ranks[post.rank].tell(encode_message(generation))
        self._inside = {one.process for one in generation.participants}

    def _tell_awaited(self) -> None:
        """Notify the user of silent processes that the run waits for, and of those that respond again."""
        before, self._awaited = self._awaited, self._coordinator.awaited
        for process in self._awaited:
            if process not in before:
                node, seconds = self._coordinator.name_of(process), LAST_HOLDER * self._patience
                message = (
                    f"node {node} has been silent for {self._patience:g} s; the run waits up to {seconds:g} s for it, "
                    "as no other node that responds holds the state of the training"
                )
                self._notify("waiting", message, node)
        for process in before:
            if process not in self._awaited and not self._coordinator.is_lost(process):
                node = self._coordinator.name_of(process)
                self._notify("heard again", f"node {node} responds again", node)

    def _require_state(self, now: float) -> None:
        """Raise NodeLost once it is certain that no remaining process holds the state of the training."""
        generation = self._coordinator.generation
        if self._coordinator.has_state or generation is None:
            self._stateless_since = None
            return
        self._stateless_since = self._stateless_since or now
        if not self._coordinator.may_have_state or now - self._stateless_since > self._patience:
            sentence = f"{generation.reason}: no remaining node holds the state of the training{self._advice}"
            raise NodeLost(sentence, generation.lost)

    def _replace(self, post: _Post, now: float) -> None:
        """Restart a process on a node whose last one has ended and is lost."""
        rank = self._ranks[post.rank]
        if not rank.has_ended or rank.has_finished or not self._coordinator.is_lost(post.number):
            return
        if not post.due:
            pause = _MIN_PAUSE_S * 2**post.failures if post.failures else 0.0
            post.failures += 1
            post.due = now + min(pause, _MAX_PAUSE_S)
        if now >= post.due and self._can_start(post.rank):
            post.number, self._next, post.due = self._next, self._next + 1, 0.0
            self._ranks[post.rank] = self._start(post.rank, post.number)

    def _number_of(self, rank: P) -> int | None:
        """Return the number of the process; None if another one has replaced it."""
        return next((post.number for post in self._posts if self._ranks[post.rank] is rank), None)
