"""The master: one thread around the sockets. What arrives goes to its handler; what follows leaves by the outbox.

poll -> frames -> handlers (a table by type of message) -> nodes (membership decides: who is in, benched, back)
                                                        -> scheduler and run (agreement, validation, history)
               -> effects (the one place where a node is taken in, or lost) -> outbox -> sockets
     -> the time alone: heartbeats, the late and the silent, events for whoever watches
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from evener.errors import Interrupted
from evener.heartbeat import is_due
from evener.ps.admission import Versions
from evener.ps.effects import Effects
from evener.ps.handlers import Handlers
from evener.ps.messages import MASTER_ENDED, Dismiss, Header, Heartbeat, Join, Outbox, ToMaster
from evener.ps.nodes import Nodes
from evener.ps.scheduler import Scheduler
from evener.ps.state_dir import StateDir
from evener.wire.frame import Buffer, Limits
from evener.wire.identity import Address, Identity
from evener.wire.server import FrameReceived, PeerConnected, PeerDisconnected, PeerRefused, Server

_TICK_SECONDS = 0.05


class MasterConfig(NamedTuple):
    """What a master is given.

    Attributes:
        home: its folder.
        identity: who it is.
        versions: of what runs here.
        environment: the same and more, for records.
        patience: seconds of silence after which a node is given up.
        notify: tells its user.
    """

    home: StateDir
    identity: Identity
    versions: Versions
    environment: dict[str, str]
    patience: float
    notify: Callable[[str], None]


class Master:
    """One master; close it.

    Args:
        config: see there.
        clock: seconds, never going back.

    Attributes:
        nodes: all that it knows.
        server: its connections.
    """

    def __init__(self, config: MasterConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience, self._notify, self._clock = config.patience, config.notify, clock
        self._outbox = Outbox()
        self.nodes = Nodes(config.patience)
        self._scheduler = Scheduler(
            config.home, self.nodes, self._outbox, clock, config.environment, config.notify
        )  # fmt: skip
        self._effects = Effects(self.nodes, self._scheduler, self._outbox, clock, config.notify)
        self._handlers = Handlers(
            config.home,
            config.versions,
            self.nodes,
            self._scheduler,
            self._effects,
            self._outbox,
            clock,
            config.notify,
        )
        limits = Limits(patience=config.patience)
        self.server: Server[Header] = Server(
            ToMaster, config.identity, limits, place=self._place, on_part=self._on_part
        )  # fmt: skip
        self._ticked = self._beaten = clock()
        self._has_ended = False

    def listen(self, address: Address) -> Address:
        """Take connections at `address`; the address with its real port.

        Raises:
            CannotListen: it is taken, or not of this machine.
        """
        bound = self.server.listen(address)
        self._handlers.address = str(bound)
        return bound

    def serve(self) -> None:
        """Be the master until a command ends it; go on with the run that the last one had in progress.

        Raises:
            InvalidFile: that run cannot be read.
        """
        self._scheduler.resume()
        while not self._handlers.is_ending:
            self.step()
        self._shut_down()

    def step(self) -> None:
        """Deal with what has happened; wait a moment for it."""
        for event in self.server.poll(_TICK_SECONDS):
            self._on_event(event)
        self._tick()

    def close(self) -> None:
        """Leave; the nodes look out for a master that comes back, unless they were told to go."""
        self.server.close(MASTER_ENDED if self._has_ended else "the master closes")
        self._scheduler.close()

    def _place(self, peer: int, header: Header, lengths: tuple[int, ...]) -> Sequence[Buffer] | None:
        return self._handlers.place(peer, header, lengths)

    def _on_part(self, peer: int, header: Header, received: int) -> None:
        self._handlers.on_part(peer, header, received)
        self._flush()

    def _on_event(self, event: Any) -> None:
        if isinstance(event, FrameReceived):
            self._handlers.on_message(event.peer, event.header, event.buffers)
        elif isinstance(event, PeerConnected):
            self._handlers.on_connected(event.peer, event.origin)
        elif isinstance(event, PeerDisconnected):
            self._handlers.on_disconnected(event.peer)
        elif isinstance(event, PeerRefused):
            self._notify(f"turned away {event.origin}: {event.reason}")
        self._flush()

    def _flush(self) -> None:
        """Hand what has to leave to the sockets."""
        for peer, header, buffers, reason in self._outbox.drain():
            if header is None:
                self.server.disconnect(peer, reason)
            else:
                self.server.send(peer, header, buffers)

    def _tick(self) -> None:
        now = self._clock()
        if now - self._ticked < _TICK_SECONDS:
            return
        self._ticked = now
        self._effects.of_time()
        self._scheduler.tick(now, self.server.is_sending)
        self._effects.of_run()
        self._flush()
        if is_due(self._beaten, now, self._patience):
            self._beaten = now
            for peer in self.server.peers:
                self.server.send(peer, Heartbeat())

    def _shut_down(self) -> None:
        """End the run and the nodes; each may finish its step, or come back, for as long as the patience."""
        dismiss = Dismiss(reason="`evener down` was typed", is_error=False)
        if self._scheduler.run is not None:
            self._scheduler.finish(Interrupted(f"stopped: {dismiss.reason}"))
            self._flush()
        for peer in self.nodes.peers:
            self.server.send(peer, dismiss)
        missing, until = self.nodes.missing, self._clock() + self._patience
        while (self.nodes.peers or missing) and self._clock() < until:
            for event in self.server.poll(_TICK_SECONDS):
                if isinstance(event, PeerDisconnected):
                    self.nodes.disconnect(event.peer)
                elif isinstance(event, FrameReceived) and isinstance(event.header, Join):
                    self.server.send(event.peer, dismiss)
                    missing.discard(event.header.name)
        self._has_ended = True
