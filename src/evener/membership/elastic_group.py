"""A group of ranks that changes: this rank leaves it when others are gone, and is in the next one when that has formed.

    changing = ElasticGroup(line, group, address)
    changing.start(founders)
    generation = changing.enter()           # `group` is that of the generation now
    ...                                     # collectives raise when somebody is gone
    changing.require_broken(error)          # returns if that is why; then enter() again

Nothing is destroyed that somebody may still write into: what was left is kept until it has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from evener.comm.group import Group
from evener.comm.mesh import Mesh
from evener.comm.mesh_joining import join_mesh
from evener.membership.aside import Aside, Inbox
from evener.membership.generation import Generation, as_one
from evener.membership.line import Line
from evener.membership.meeting import LONGEST_WAIT, Connections, Meeting
from evener.membership.watch import Watch
from evener.records.errors import LineCut, NodeLost

_MARGIN = 1.0
"""Seconds, besides the patience, within which the authority knows of a rank that is gone."""


class ElasticGroup:
    """The ranks of the present generation.

    Args:
        line: to the authority.
        group: that takes the place of this rank in every generation.
        address: of this machine, at which the other ranks reach it.
        on_first: called once, when there is a first generation: from then on the authority sees who is silent.

    Attributes:
        number: of the generation that `group` is.
        known_at: when this process last learnt that ranks are gone, by `time.perf_counter`; 0: whoever read it knows.
    """

    def __init__(self, line: Line, group: Group, address: str, on_first: Callable[[], None] = lambda: None) -> None:
        self.number, self.known_at = 0, 0.0
        self._line, self._group, self._address, self._on_first = line, group, address, on_first
        self._watch = Watch(line, self._abort, self._cut_line)
        self._connections = Connections()
        self._left: list[Connections] = []
        self._asides: list[Aside] = []

    def start(self, founders: tuple[str, ...] = ()) -> None:
        """Say that this rank can take part: in the first generation with the `founders`, or in a later one."""
        self._group.is_elastic = True
        self._watch.start(founders)

    def enter(self) -> Generation:
        """Wait for the next generation, and be a rank of it. Raises NodeLost: its ranks cannot meet."""
        while True:
            generation = self._watch.newer(self.number)
            assert generation is not None
            if self.number == 0:
                self._on_first()
            connections = self._meet(generation)
            self._leave()
            with self._watch.changed:
                self.number = generation.number
                if connections is not None and not self._watch.is_broken(self.number):
                    self._take_place(generation, connections)
                    return generation
            if connections is not None:
                self._left.append(connections)

    def require_broken(self, error: Exception) -> None:
        """Return if `error` came of ranks that are gone, once the authority knows of it; else raise it."""
        if self._watch.is_broken(self.number):
            return
        if not isinstance(error, NodeLost) and not self._connections.is_broken:
            raise error
        with self._watch.changed:
            seconds = self._line.patience + _MARGIN
            if not self._watch.changed.wait_for(lambda: self._watch.is_broken(self.number), seconds):
                raise error

    @property
    def is_followed(self) -> bool:
        """Whether there is a newer generation."""
        newest = self._watch.newest
        return newest is not None and newest.number > self.number

    def is_followed_within(self, seconds: float) -> bool:
        """Whether there is a newer generation, or will be one so soon."""
        return self._watch.newer(self.number, seconds) is not None

    def fence(self) -> None:
        """Return when this rank was certainly not given up up to now; before it changes or publishes anything."""
        self._watch.fence()

    def aside(self, first: int, second: int, work: Callable[[Mesh, Inbox], None]) -> Aside:
        """Begin something in a thread with a connection of the ranks `first` and `second`, who both call this."""
        group, patience = self._group, self._line.patience + _MARGIN
        is_second, nodes = group.rank == second, [group.nodes[first], group.nodes[second]]
        place = f"generation/{self.number}/aside/{first}-{second}"

        def join() -> Mesh:
            store = self._line.open_store().under(place)
            store.set_timeout(timedelta(seconds=patience))
            return join_mesh(
                rank=int(is_second),
                nodes=nodes,
                store=store,
                address=self._address,
                patience=patience,
                longest_wait=LONGEST_WAIT,
            )

        begun = Aside(join, work)
        self._asides.append(begun)
        return begun

    def at_step(self, step: int) -> None:
        """Note the step that this rank works on."""
        self._watch.step = step

    def what_began(self) -> Generation:
        """The present generation, with the reasons of those before it that were over before anybody told of them."""
        with self._watch.changed:
            began = [one for one in self._watch.untold if one.number <= self.number]
        return as_one(began[1:] if began[0].number == 1 < self.number else began)

    def has_told(self) -> None:
        """Note that the user knows what began this generation."""
        with self._watch.changed:
            self._watch.untold = [one for one in self._watch.untold if one.number > self.number]

    def has_state(self) -> None:
        """Note, and say at once, that this rank holds the state of the training."""
        self._watch.say_holds(self.number)

    def _meet(self, generation: Generation) -> Connections | None:
        """Connections to the ranks of `generation`; None if one of them is gone already."""
        rank, watch = generation.rank_of(self._line.process), self._watch
        assert rank is not None
        meeting = Meeting(generation, rank, self._line.open_store, self._address, watch.changed, self._line.patience)
        with watch.changed:
            watch.changed.wait_for(lambda: meeting.has_ended or watch.is_broken(generation.number))
            if meeting.error is None or watch.is_broken(generation.number):
                meeting.leave()
                return meeting.connections
            watch.changed.wait_for(lambda: watch.is_broken(generation.number), self._line.patience + _MARGIN)
            if not watch.is_broken(generation.number):
                raise meeting.error
        return None

    def _take_place(self, generation: Generation, connections: Connections) -> None:
        rank = generation.rank_of(self._line.process)
        assert rank is not None
        self._connections, group = connections, self._group
        group.become(rank, generation.nodes, connections.mesh, connections.reports, connections.sums)

    def _leave(self) -> None:
        """Leave the connections of before; let go what has ended of those that were left."""
        self._abort_all(NodeLost("this generation is over"))
        self._asides = []
        self._left = [one for one in (*self._left, self._connections) if not one.has_ended()]

    def _abort(self, generation: Generation) -> None:
        """Called in another thread, holding its lock: ranks are gone."""
        self.known_at = time.perf_counter()
        self._abort_all(NodeLost(generation.reason, generation.lost))

    def _cut_line(self) -> NodeLost | None:
        """What this rank ends with because of a line that is cut; the earlier rank of the two waits for that."""
        lines = self._connections.lines
        cut = None if lines is None else lines.cut()
        return cut if isinstance(cut, LineCut) else None

    def _abort_all(self, error: NodeLost) -> None:
        self._connections.abort(error)
        for aside in self._asides:
            aside.abort(error)
