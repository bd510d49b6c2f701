"""A group of ranks that changes: this rank leaves it when others are lost, and enters the next generation.

    changing = ElasticGroup(line, group, address)
    changing.start(initial_nodes)
    generation = changing.enter()           # `group` now has the ranks of the generation
    ...                                     # collectives raise when a rank is lost
    changing.require_broken(error)          # returns if that is why; then enter() again

Abandoned connections live until they have ended, because a peer may still write into their tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from evener.comm.group import Group
from evener.comm.mesh import Mesh
from evener.comm.mesh_joining import join_mesh
from evener.membership.control_channel import ControlChannel
from evener.membership.generation import Generation, as_one
from evener.membership.membership_client import MembershipClient
from evener.membership.rendezvous import LONGEST_WAIT, Connections, Rendezvous
from evener.membership.side_channel import Inbox, SideChannel
from evener.records.errors import LineCut, NodeLost

_MARGIN = 1.0
"""Seconds, in addition to the patience, within which the coordinator knows of a lost rank."""


class ElasticGroup:
    """The ranks of the current generation.

    Args:
        line: control channel to the coordinator.
        group: that this rank uses in every generation.
        address: of this machine, at which the other ranks reach it.
        on_first: called once, at the first generation; from then on the coordinator detects silent ranks.

    Attributes:
        number: of the generation of `group`.
        known_at: time by `time.perf_counter` at which this process last learnt of lost ranks; 0 before, or once read.
    """

    def __init__(
        self, line: ControlChannel, group: Group, address: str, on_first: Callable[[], None] = lambda: None
    ) -> None:
        self.number, self.known_at = 0, 0.0
        self._line, self._group, self._address, self._on_first = line, group, address, on_first
        self._client = MembershipClient(line, address, self._abort, self._cut_line)
        self._connections = Connections()
        self._abandoned: list[Connections] = []
        self._side_channels: list[SideChannel] = []

    def start(self, initial_nodes: tuple[str, ...] = ()) -> None:
        """Report that this rank can take part: in the first generation with the `initial_nodes`, or in a later one."""
        self._group.is_elastic = True
        self._client.start(initial_nodes)

    def enter(self) -> Generation:
        """Wait for the next generation and become a rank of it. Raises NodeLost if its ranks cannot connect."""
        while True:
            generation = self._client.newer(self.number)
            assert generation is not None
            if self.number == 0:
                self._on_first()
            connections = self._meet(generation)
            self._leave()
            with self._client.changed:
                self.number = generation.number
                if connections is not None and not self._client.is_broken(self.number):
                    self._take_place(generation, connections)
                    return generation
            if connections is not None:
                self._abandoned.append(connections)

    def require_broken(self, error: Exception) -> None:
        """Return if `error` follows from lost ranks, once the coordinator confirms it; else raise it."""
        if self._client.is_broken(self.number):
            return
        if not isinstance(error, NodeLost) and not self._connections.is_broken:
            raise error
        with self._client.changed:
            seconds = self._line.patience + _MARGIN
            if not self._client.changed.wait_for(lambda: self._client.is_broken(self.number), seconds):
                raise error

    @property
    def is_followed(self) -> bool:
        """Whether there is a newer generation."""
        newest = self._client.newest
        return newest is not None and newest.number > self.number

    def is_followed_within(self, seconds: float) -> bool:
        """Whether there is a newer generation, or one comes within `seconds`."""
        return self._client.newer(self.number, seconds) is not None

    def fence(self) -> None:
        """Return when this rank was certainly not lost until now; call it before changing or publishing anything."""
        self._client.fence()

    def side_channel(self, first: int, second: int, work: Callable[[Mesh, Inbox], None]) -> SideChannel:
        """Begin work in a thread over a connection of the ranks `first` and `second`, which both call this."""
        group, patience = self._group, self._line.patience + _MARGIN
        is_second, nodes = group.rank == second, [group.nodes[first], group.nodes[second]]
        place = f"generation/{self.number}/side-channel/{first}-{second}"

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

        channel = SideChannel(join, work)
        self._side_channels.append(channel)
        return channel

    def at_step(self, step: int) -> None:
        """Record the current step of this rank."""
        self._client.step = step

    def what_began(self) -> Generation:
        """Return the current generation, with the reasons of earlier ones that the user has not seen."""
        with self._client.changed:
            began = [one for one in self._client.untold if one.number <= self.number]
        return as_one(began[1:] if began[0].number == 1 < self.number else began)

    def has_told(self) -> None:
        """Record that the user has seen the reason of this generation."""
        with self._client.changed:
            self._client.untold = [one for one in self._client.untold if one.number > self.number]

    def has_state(self) -> None:
        """Record, and report at once, that this rank holds the state of the training."""
        self._client.say_holds(self.number)

    def _meet(self, generation: Generation) -> Connections | None:
        """Connect to the ranks of `generation`; return None if one of them is lost already."""
        rank, client = generation.rank_of(self._line.process), self._client
        assert rank is not None
        rendezvous = Rendezvous(
            generation, rank, self._line.open_store, self._address, client.changed, self._line.patience
        )
        with client.changed:
            client.changed.wait_for(lambda: rendezvous.has_ended or client.is_broken(generation.number))
            if rendezvous.error is None or client.is_broken(generation.number):
                rendezvous.leave()
                return rendezvous.connections
            client.changed.wait_for(lambda: client.is_broken(generation.number), self._line.patience + _MARGIN)
            if not client.is_broken(generation.number):
                raise rendezvous.error
        return None

    def _take_place(self, generation: Generation, connections: Connections) -> None:
        rank = generation.rank_of(self._line.process)
        assert rank is not None
        self._connections, group = connections, self._group
        group.become(rank, generation.nodes, connections.mesh, connections.reports, connections.sums)

    def _leave(self) -> None:
        """Abort the previous connections, and release those that have ended."""
        self._abort_all(NodeLost("this generation is over"))
        self._side_channels = []
        self._abandoned = [one for one in (*self._abandoned, self._connections) if not one.has_ended()]

    def _abort(self, generation: Generation) -> None:
        """Handle lost ranks; called in another thread, which holds its lock."""
        self.known_at = time.perf_counter()
        self._abort_all(NodeLost(generation.reason, generation.lost))

    def _cut_line(self) -> NodeLost | None:
        """Return the error of this rank for a broken connection, if it is the later rank of the two."""
        lines = self._connections.lines
        cut = None if lines is None else lines.cut()
        return cut if isinstance(cut, LineCut) else None

    def _abort_all(self, error: NodeLost) -> None:
        self._connections.abort(error)
        for channel in self._side_channels:
            channel.abort(error)
