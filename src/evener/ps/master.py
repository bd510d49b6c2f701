"""The master: one thread around the hub. What arrives goes to whom it concerns; what follows is sent.

poll -> who came and went, what was said   -> members (membership decides: who is in, benched, back)
                                            -> employer and run (agreement, validation, the ledger)
     -> the time alone: beats, the late and the silent, news for whoever watches
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from evener.errors import Interrupted
from evener.heartbeat import is_due
from evener.ps import messages as say
from evener.ps.admission import Versions
from evener.ps.consequences import Consequences
from evener.ps.conversation import Conversation, Desk
from evener.ps.employer import Employer
from evener.ps.landing import Landing
from evener.ps.members import Members
from evener.ps.messages import Header
from evener.ps.roster import Roster
from evener.ps.state_dir import StateDir
from evener.wire.frame import Limits
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
        tell: tells its user.
    """

    home: StateDir
    identity: Identity
    versions: Versions
    environment: dict[str, str]
    patience: float
    tell: Callable[[str], None]


class Master:
    """One master; close it.

    Args:
        setting: see there.
        clock: seconds, never going back.
    """

    def __init__(self, setting: MasterConfig, clock: Callable[[], float] = time.monotonic) -> None:
        patience, tell = setting.patience, setting.tell
        self._patience, self._tell, self._clock = patience, tell, clock
        self._hub: Server[Header] = Server(
            say.ToMaster,
            setting.identity,
            Limits(patience=patience),
            place=lambda *words: self._landing.place(*words),
            on_part=lambda *words: self._landing.on_part(*words),
        )
        self._members = Members(Roster(patience=patience))
        self._employer = Employer(
            setting.home,
            self._members,
            self._hub.send,
            self._hub.is_sending,
            clock,
            patience,
            setting.environment,
            tell,
        )
        self._consequences = Consequences(self._hub, self._members, self._employer, clock, tell)
        self._landing = Landing(self._members, self._employer, self._consequences)
        desk = Desk(setting.home, setting.versions, patience, tell, clock)
        self._conversation = Conversation(
            desk, self._hub, self._members, self._employer, self._consequences, self._go_down
        )
        self._ticked = self._beaten = clock()
        self._ending = False

    def listen(self, address: Address) -> Address:
        """Take connections at `address`; the address with its real port.

        Raises:
            CannotListen: it is taken, or not of this machine.
        """
        bound = self._hub.listen(address)
        self._conversation.address = str(bound)
        return bound

    def serve(self) -> None:
        """Be the master until a command ends it; go on with the run that the last one had in progress.

        Raises:
            InvalidFile: that run cannot be read.
        """
        self._employer.recall()
        while not self._ending:
            for event in self._hub.poll(_TICK_SECONDS):
                self._on_event(event)
            self._tick()

    def close(self) -> None:
        """Leave; the nodes look out for a master that comes back, unless they were told to go."""
        self._hub.close(say.MASTER_ENDED if self._ending else "the master closes")
        self._employer.close()

    def _on_event(self, event: Any) -> None:
        if isinstance(event, FrameReceived):
            if not self._landing.is_dealt_with(event.peer, event.header):
                self._conversation.on_message(event.peer, event.header, event.buffers)
        elif isinstance(event, PeerConnected):
            self._conversation.origins[event.peer] = event.origin
        elif isinstance(event, PeerDisconnected):
            self._on_closed(event.peer)
        elif isinstance(event, PeerRefused):
            self._tell(f"turned away {event.origin}: {event.reason}")
        self._consequences.of_work()

    def _on_closed(self, peer: int) -> None:
        self._conversation.origins.pop(peer, None)
        self._landing.forget(peer)
        self._employer.left(peer)
        member = self._members.disconnect(peer)
        if member is not None:
            self._consequences.of("disconnected", member)

    def _go_down(self) -> None:
        """End the run and the nodes; each may finish its step, or come back, for as long as the patience."""
        farewell = say.Dismiss(reason="`evener down` was typed", is_error=False)
        if self._employer.run is not None:
            self._employer.settle(Interrupted(f"stopped: {farewell.reason}"))
        for peer in self._members.peers:
            self._hub.send(peer, farewell)
        missing, until = self._members.missing, self._clock() + self._patience
        while (self._members.peers or missing) and self._clock() < until:
            for event in self._hub.poll(_TICK_SECONDS):
                if isinstance(event, PeerDisconnected):
                    self._members.disconnect(event.peer)
                elif isinstance(event, FrameReceived) and isinstance(event.header, say.Join):
                    self._hub.send(event.peer, farewell)
                    missing.discard(event.header.name)
        self._ending = True

    def _tick(self) -> None:
        now = self._clock()
        if now - self._ticked < _TICK_SECONDS:
            return
        self._ticked = now
        self._consequences.follow(self._members.tick(now))
        self._employer.tick(now)
        self._consequences.of_work()
        if is_due(self._beaten, now, self._patience):
            self._beaten = now
            for peer in self._hub.peers:
                self._hub.send(peer, say.Heartbeat())
