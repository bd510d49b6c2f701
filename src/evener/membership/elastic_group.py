"""A rank's side of an elastic run: it leaves its group when others are lost, and enters the next generation.

    changing = ElasticGroup(line, group, address)
    changing.start(initial_nodes)
    generation = changing.enter()           # `group` now has the ranks of the generation
    ...                                     # collectives raise when a rank is lost
    changing.require_broken(error)          # returns if that is why; then enter() again

Abandoned connections live until they have ended, because a peer may still write into their tensors.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

from evener.comm.group import Group
from evener.comm.mesh import Mesh
from evener.comm.mesh_joining import join_mesh
from evener.membership.control_channel import ControlChannel
from evener.membership.generation import (
    Beat,
    Generation,
    Hello,
    Probe,
    ToCoordinator,
    as_one,
    decode_for_process,
    encode_message,
)
from evener.membership.line_probe import LineProbe
from evener.membership.rendezvous import LONGEST_WAIT, Connections, Rendezvous
from evener.membership.side_channel import SideChannel
from evener.records.errors import EvenerError, Interrupted, LineCut, NodeLost
from evener.system.heartbeat import interval

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
        """Wait for the next generation and become a rank of it.

        Raises:
            NodeLost: its ranks cannot connect.
            Interrupted: it excludes this rank, which leaves on notice.
        """
        while True:
            generation = self._client.newer(self.number)
            assert generation is not None
            if generation.rank_of(self._line.process) is None:
                self._client.await_release()
                raise Interrupted(f"node {self._line.node} left the run on notice")
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

    def side_channel(self, first: int, second: int, work: Callable[[Mesh, SideChannel], None]) -> SideChannel:
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
            generation,
            rank,
            self._line.open_store,
            self._address,
            client.changed,
            self._line.patience,
            self._group.device,
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


_SURE_FRACTION = 0.5
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
        self._urgent, self._is_leaving = 0, False
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

    def await_release(self) -> None:
        """Wait until the others, which may still read from this process, compute without it; not for ever."""
        with self.changed:
            self.changed.wait_for(lambda: self._is_over.is_set(), self._line.patience + _MARGIN)

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
                    self._answered = message.count
                    self._sure_until = self._sent_at + _SURE_FRACTION * self._line.patience
                self.changed.notify_all()

    def _begin(self, generation: Generation) -> None:
        is_outside = generation.rank_of(self._line.process) is None
        if is_outside and not self._is_leaving and generation.is_urgent:
            self._end("was dropped by the run: it did not respond in time")
            return
        self._is_leaving |= is_outside
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
