"""The master: one thread around the sockets. Each frame goes to its handler, and answers are sent at once.

poll -> frames -> handlers (a table by type of message) -> nodes (`node_rules` decides: joined, excluded, back)
                                                        -> scheduler and run (agreement, validation, history)
               -> effects (carry out what was decided about nodes)
     -> timers: heartbeats, late and silent nodes, events for subscribers

An error while a frame is handled closes its sender's connection; an error in a run ends that run.
"""

from __future__ import annotations

from typing import Any

from evener.ps.master.access.audit import AuditLog, trace_of
from evener.ps.master.access.quotas import connection_limits
from evener.ps.master.effects import Effects
from evener.ps.master.handlers import Handlers
from evener.ps.master.nodes import Nodes
from evener.ps.master.scheduler import Scheduler
from evener.ps.protocol.config import MasterConfig, reachable_address
from evener.ps.protocol.directions import ToMaster
from evener.ps.protocol.messages import MASTER_ENDED, Dismiss, Header, Heartbeat, Join
from evener.records.errors import Interrupted, first_line
from evener.records.schema import shown
from evener.system.heartbeat import ListenedSeconds, is_due
from evener.wire.errors import BadFrame
from evener.wire.identity import Address
from evener.wire.relay_lines import RelayLines
from evener.wire.server import Server
from evener.wire.server_events import FrameReceived, PeerConnected, PeerDisconnected, PeerFailed, PeerRefused

_TICK_SECONDS = 0.05


class Master:
    """One master; close it.

    Args:
        config: configuration of the master.

    Attributes:
        nodes: all nodes that it knows.
        server: server of its connections.
    """

    def __init__(self, config: MasterConfig) -> None:
        self._patience, self._notify, self._clock = config.patience, config.notify, config.clock
        self.nodes = Nodes(config.patience)
        self.server: Server[Header] = Server(ToMaster, config.identity, connection_limits(config.patience))
        self._scheduler = Scheduler(config, self.nodes, self.server.send)
        self._effects = Effects(self.nodes, self._scheduler, self.server, config)
        self._audit = self._effects.audit
        self._refusals = AuditLog(config.home.refusals, config.notify, lines_per_minute=1, clock=config.clock)
        self._handlers = Handlers(config, self.nodes, self._scheduler, self._effects, self.server)
        self.server.place, self.server.on_part = self._handlers.place, self._handlers.on_part
        self._ticked = self._beaten = config.clock()
        self._listened = ListenedSeconds(config.patience, self._ticked)
        self._has_ended = False

    def listen(self, address: Address) -> Address:
        """Listen at `address`; return the address with its real port.

        Raises:
            CannotListen: the address is in use, or not of this machine.
        """
        bound = self.server.listen(address)
        self._handlers.commands.address = str(reachable_address(bound))
        return bound

    def listen_by(self, lines: RelayLines) -> None:
        """Also accept nodes that come through a relay, whose address nodes then join."""
        self.server.listen_by(lines)
        self._handlers.commands.address = str(lines.address)

    def serve(self) -> None:
        """Run the master until a command ends it; continue the runs that the last one had in progress.

        Raises:
            InvalidInput: the list of its nodes, or of its invitations, cannot be read.
        """
        self._handlers.load()
        self._scheduler.resume()
        while not self._handlers.commands.is_ending:
            self.step()
        self._shut_down()

    def step(self) -> None:
        """Handle events; wait a moment for them."""
        for event in self.server.poll(_TICK_SECONDS):
            self._on_event(event)
        self._handlers.serve()
        self._tick()

    def close(self) -> None:
        """Close all connections; nodes wait for a restarted master, unless they were dismissed."""
        self.server.close(MASTER_ENDED if self._has_ended else "the master closes")
        self._scheduler.close()
        self._handlers.close()

    def _on_event(self, event: Any) -> None:
        if isinstance(event, FrameReceived):
            try:
                self._handlers.on_message(event.peer, event.header, event.buffers)
            except Exception as error:  # the error concerns this peer only
                self.server.fail(event.peer, error)
        elif isinstance(event, PeerConnected):
            self._handlers.on_connected(event.peer, event.origin, event.grant)
        elif isinstance(event, PeerFailed):
            self._on_failed(event.peer, event.error)
        elif isinstance(event, PeerDisconnected):
            self._handlers.on_disconnected(event.peer)
        elif isinstance(event, PeerRefused):
            self._on_refused(event)

    def _on_refused(self, event: PeerRefused) -> None:
        """Report a connection without a valid token, once a minute for each host."""
        if self._refusals.write("turned away", address=event.origin, detail=event.reason):
            self._notify(f"turned away {event.origin}: {event.reason}")

    def _on_failed(self, peer: int, error: Exception) -> None:
        """Report a peer whose connection is closed because of an error; the audit log has the details."""
        name, address, invitation = self._handlers.who(peer)
        is_fault = not isinstance(error, BadFrame)
        sentence = shown(f"{type(error).__name__}: {first_line(error)}") if is_fault else str(error)
        detail = trace_of(error) if is_fault else sentence
        what = "fault" if is_fault else "refused"
        if self._audit.write(what, name=name, address=address, invitation=invitation, detail=detail):
            self._notify(f"closed the connection to {f'node {name} at ' if name else ''}{address}: {sentence}")

    def _tick(self) -> None:
        now = self._clock()
        if now - self._ticked < _TICK_SECONDS:
            return
        self._ticked = now
        if away := self._listened.away(now):  # as while the machine sleeps
            self.nodes.excuse(away, now)
        self._listened.at(now)
        self._effects.of_time()
        self._scheduler.tick(now, self.server.is_delivering)
        self._effects.of_runs()
        self._handlers.tick(now)
        self._beat(now)
        for what, host, count in (*self._refusals.tick(), *self._audit.tick()):
            self._notify(f"{what}: {count} more from {host or 'this machine'} within a minute")

    def _beat(self, now: float) -> None:
        """Send heartbeats to all peers if they are due."""
        if is_due(self._beaten, now, self._patience):
            self._beaten = now
            for peer in self.server.peers:
                self.server.send(peer, Heartbeat())

    def _shut_down(self) -> None:
        """End the runs and the nodes; each node has the patience to finish its step, or to reconnect."""
        dismiss = Dismiss(reason="`evener down` was typed", is_error=False)
        self._scheduler.end(Interrupted(f"stopped: {dismiss.reason}"))
        for peer in self.nodes.peers:
            self.server.send(peer, dismiss)
        missing, until = self.nodes.missing, self._clock() + self._patience
        while (self.nodes.peers or missing) and self._clock() < until:
            self._beat(self._clock())
            for event in self.server.poll(_TICK_SECONDS):
                if isinstance(event, PeerDisconnected):
                    self.nodes.disconnect(event.peer)
                elif isinstance(event, FrameReceived) and isinstance(event.header, Join):
                    self.server.send(event.peer, dismiss)
                    missing.discard(event.header.name)
        self._has_ended = True
