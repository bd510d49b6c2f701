"""The ranks of an elastic run, wherever they are: who is gone is left behind, and its node is given another process.

Whoever had the ranks started is the authority, the process that was typed or a master: it sees a process end, hears the
beats of the others, and is the only one that makes generations. What it decides is decided by
`evener.membership.authority`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from evener.membership.authority import LAST_HOLDER, Authority
from evener.membership.generation import Generation, Heard, Hello, decode_for_authority, encode_message
from evener.records.errors import NodeLost

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0
"""Seconds before another process is started on a node where one after the other ends without having taken part."""


class Failure(Protocol):
    """How a process says that it failed."""

    @property
    def is_own(self) -> bool:
        """Whether it arose there; else another process was gone."""
        ...

    @property
    def sentence(self) -> str:
        """For the user."""
        ...


class RankProcess(Protocol):
    """A process that stands for a node, here or on another machine, as the authority sees it."""

    @property
    def said(self) -> deque[bytes]:
        """To the authority, and not yet read by it."""
        ...

    @property
    def failure(self) -> Failure | None:
        """How it failed; None if it did not say so."""
        ...

    @property
    def has_finished(self) -> bool:
        """Whether it said that its work is done."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more, however it ended."""
        ...

    @property
    def is_silent(self) -> bool:
        """Whether all that it said has been read."""
        ...

    @property
    def has_failed(self) -> bool:
        """Whether it said so, or ended without a word."""
        ...

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        ...

    def tell(self, data: bytes) -> None:
        """Let the process hear the authority's words; one that has ended hears nothing."""
        ...


P = TypeVar("P", bound=RankProcess)


@dataclass
class _Post:
    """A node, and the process that stands for it now.

    Attributes:
        rank: of the node among those that the run was started on.
        number: of the process.
        failures: processes that ended here, one after the other, before they took part.
        due: when the next one may start.
    """

    rank: int
    number: int
    failures: int = 0
    due: float = 0.0


class ElasticRanks(Generic[P]):
    """Follows the ranks of one run, and replaces those that are gone.

    Args:
        ranks: the processes that stand for the nodes, by rank at the start; replaced in place.
        patience: seconds of silence after which a process is given up.
        start: a process on the node of this rank, with this number.
        can_start: whether there can be another process on the node of this rank now.
        first: number of the first process.
        keep: called with every generation before anybody is told of it.
        advice: what a user does when nobody is left.
        notify: takes (kind, message, node) of what happens besides generations.

    Attributes:
        is_stopping: whether the run was asked to stop, so that nobody is replaced any more.
    """

    def __init__(
        self,
        ranks: list[P],
        patience: float,
        start: Callable[[int, int], P],
        can_start: Callable[[int], bool] = lambda _: True,
        first: int = 0,
        keep: Callable[[Generation], None] = lambda _: None,
        advice: str = "; go on from the last checkpoint with --resume",
        notify: Callable[[str, str, str], None] = lambda _kind, _message, _node: None,
    ) -> None:
        self._keep, self._advice, self._notify = keep, advice, notify
        self._awaited: tuple[int, ...] = ()
        self._ranks, self._start, self._can_start = ranks, start, can_start
        self._authority, self._patience = Authority(patience), patience
        self._posts = [_Post(rank, first + rank) for rank in range(len(ranks))]
        self._next = first + len(ranks)
        self._inside: set[int] = set()
        self._stateless_since: float | None = None
        self.is_stopping = False

    @property
    def has_begun(self) -> bool:
        """Whether all ranks had come, and train."""
        return self._authority.generation is not None

    @property
    def has_trained(self) -> bool:
        """Whether a step may have been made."""
        return self._authority.has_trained

    @property
    def generation(self) -> Generation | None:
        """The newest; None before all have come."""
        return self._authority.generation

    @property
    def is_settled(self) -> bool:
        """Whether the ranks of the newest generation compute again."""
        return self._authority.is_settled

    def resume(
        self,
        generation: Generation | None,
        numbers: Sequence[int],
        given_up: Iterable[int],
        next: int,
        absence: float = 0.0,
    ) -> None:
        """Go on with a run whose authority was killed.

        Args:
            generation: the newest; None before all had come.
            numbers: of the processes, by rank.
            given_up: those of them that the run goes on without.
            next: number of the next process.
            absence: seconds that its processes may take to be heard again, if that is more than the patience.
        """
        self._authority.resume(generation, given_up, time.monotonic(), absence)
        self._posts = [_Post(rank, number) for rank, number in enumerate(numbers)]
        self._next, self._inside = next, {one.process for one in generation.participants} if generation else set()

    def has_given_up(self, rank: P) -> bool:
        """Whether the run goes on without this process."""
        number = self._number_of(rank)
        return number is None or self._authority.has_given_up(number)

    def is_last_holder(self, rank: P) -> bool:
        """Whether this process holds the state of the training, and no other that does is heard."""
        number = self._number_of(rank)
        return number is not None and self._authority.is_last_holder(number)

    def add_node(self) -> None:
        """Have a process on another node, which has come."""
        rank, number = len(self._ranks), self._next
        self._next += 1
        self._ranks.append(self._start(rank, number))
        self._posts.append(_Post(rank, number))

    def is_needed(self, rank: P) -> bool:
        """Whether the run is not over without this process."""
        number = self._number_of(rank)
        if number is not None and self._is_over():  # the others have done all steps
            return self._authority.holds_state(number) and not (rank.has_failed and rank.failure is None)
        return self.may_speak(rank)

    def ends_the_run(self, rank: P) -> bool:
        """Whether the failure of this process is one of the run, and not the loss of a node."""
        if self._authority.generation is None:
            return rank.has_failed
        return rank.failure is not None and rank.failure.is_own and self._number_of(rank) in self._inside

    def may_speak(self, rank: P) -> bool:
        """Whether this process takes part, so that what it says is of the run."""
        generation, number = self._authority.generation, self._number_of(rank)
        return generation is None or (number is not None and generation.rank_of(number) is not None)

    def govern(self) -> None:
        """Read what the processes said, see who is gone, and do what follows. Raises NodeLost: nobody holds the state.

        Called whenever a process did or said anything, and several times a second.
        """
        now = time.monotonic()
        for post in self._posts:
            self._read(post, now)
        if self._is_over():
            return
        for post in self._posts:
            self._see_end(post)
        generation = self._authority.decide(now)
        self._tell_awaited()
        if generation is not None:
            self._announce(generation)
        self._require_state(now)
        if self._authority.generation is not None and not self.is_stopping:
            for post in self._posts:
                self._replace(post, now)

    def _read(self, post: _Post, now: float) -> None:
        rank = self._ranks[post.rank]
        while rank.said:
            message = decode_for_authority(rank.said.popleft())
            if isinstance(message, Hello):
                self._authority.arrive(post.number, message, now)
            else:
                self._authority.hear(post.number, message)
                if message.holds:
                    post.failures = 0
                if not self._authority.has_given_up(post.number):
                    rank.tell(encode_message(Heard(count=message.count)))

    def _is_over(self) -> bool:
        """Whether a rank has done all its work, which none does before all have done all steps."""
        generation = self._authority.generation
        return generation is not None and any(
            self._ranks[post.rank].has_finished and generation.rank_of(post.number) is not None for post in self._posts
        )

    def _see_end(self, post: _Post) -> None:
        rank = self._ranks[post.rank]
        if rank.has_ended and rank.is_silent and not rank.has_finished and not self.ends_the_run(rank):
            self._authority.lose(post.number, rank.ending if rank.failure is None else rank.failure.sentence)

    def _announce(self, generation: Generation) -> None:
        """Tell everybody who takes part, and who does no more."""
        self._keep(generation)
        concerned = self._inside | {one.process for one in generation.participants}
        for post in self._posts:
            if post.number in concerned:
                self._ranks[post.rank].tell(encode_message(generation))
        self._inside = {one.process for one in generation.participants}

    def _tell_awaited(self) -> None:
        """Have the user know for which silent process the run waits, and which one is heard again."""
        before, self._awaited = self._awaited, self._authority.awaited
        for process in self._awaited:
            if process not in before:
                node, seconds = self._authority.name_of(process), LAST_HOLDER * self._patience
                message = (
                    f"node {node} has been silent for {self._patience:g} s; the run waits up to {seconds:g} s for it, "
                    "as no other node that responds holds the state of the training"
                )
                self._notify("waiting", message, node)
        for process in before:
            if process not in self._awaited and not self._authority.has_given_up(process):
                node = self._authority.name_of(process)
                self._notify("heard again", f"node {node} responds again", node)

    def _require_state(self, now: float) -> None:
        """Raise NodeLost once it is certain that nobody is left who holds the state of the training."""
        generation = self._authority.generation
        if self._authority.has_state or generation is None:
            self._stateless_since = None
            return
        self._stateless_since = self._stateless_since or now
        if not self._authority.may_have_state or now - self._stateless_since > self._patience:
            sentence = f"{generation.reason}: nobody is left who holds the state of the training{self._advice}"
            raise NodeLost(sentence, generation.lost)

    def _replace(self, post: _Post, now: float) -> None:
        """Start another process on a node whose last one has ended, and is known to be lost, soon."""
        rank = self._ranks[post.rank]
        if not rank.has_ended or rank.has_finished or not self._authority.has_given_up(post.number):
            return
        if not post.due:
            pause = _FIRST_PAUSE * 2**post.failures if post.failures else 0.0
            post.failures += 1
            post.due = now + min(pause, _LONGEST_PAUSE)
        if now >= post.due and self._can_start(post.rank):
            post.number, self._next, post.due = self._next, self._next + 1, 0.0
            self._ranks[post.rank] = self._start(post.rank, post.number)

    def _number_of(self, rank: P) -> int | None:
        """None: another process has taken its place."""
        return next((post.number for post in self._posts if self._ranks[post.rank] is rank), None)
