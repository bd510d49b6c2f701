"""The master: one thread around the hub. What arrives goes to whom it concerns; what follows is sent.

    poll -> who came and went, what was said   -> members (membership decides: who is in, benched, back)
                                                -> employer and run (agreement, validation, the ledger)
         -> the time alone: beats, the late and the silent, news for whoever watches

Contributions are dealt with the moment their last byte is here, before the hub reads on: a node that overlaps
communication with work may have the next one right behind it, for the same memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from evener.errors import Interrupted
from evener.noun import write_noun
from evener.profile import ClusterProfile
from evener.star import messages as say
from evener.star.decision import Decision, Verdict, What
from evener.star.employer import Employer
from evener.star.home import Home
from evener.star.members import Member, Members
from evener.star.messages import Contribution, Letter
from evener.star.parcel import CHUNK_BYTES
from evener.star.reception import Versions, receive
from evener.star.roster import Roster
from evener.star.situation import Situation, encode_situation, node_states
from evener.wire import Address, BadFrame, Closed, Hub, Identity, Limits, Message, Opened, Refused, Sent
from evener.wire.frame import Buffer, allocate

_TICK_SECONDS = 0.05
_BEATS = 5
"""Within the patience, at least."""
_LONGEST_INTERVAL = 0.5
"""Seconds between two beats, at most."""

EVENTS: dict[Verdict, str] = {
    "admit": "joined",
    "resume": "back",
    "take back": "back",
    "replace": "replaced",
    "expect": "away",
    "wait": "waits",
    "pass over": "passed over",
    "bench": "benched",
    "dismiss": "dismissed",
    "release": "left",
}
"""What each decision is called in a record."""


class Setting(NamedTuple):
    """What a master is given.

    Attributes:
        home: its folder.
        identity: who it is.
        versions: of what runs here.
        environment: the same and more, for records.
        patience: seconds of silence after which a node is given up.
        tell: tells its user.
    """

    home: Home
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

    def __init__(self, setting: Setting, clock: Callable[[], float] = time.monotonic) -> None:
        self._setting, self._clock = setting, clock
        limits = Limits(patience=setting.patience)
        self._hub: Hub[Letter] = Hub(
            say.ToMaster, setting.identity, limits, place=self._place, on_part=self._on_part
        )  # fmt: skip
        self._members = Members(Roster(patience=setting.patience))
        self._employer = Employer(
            setting.home, self._members, self._hub.send, clock, setting.patience, setting.environment, setting.tell
        )
        self._origins: dict[int, str] = {}
        self._lengths: dict[int, int] = {}
        self._ticked = self._beaten = clock()
        self._ending = False
        self._address = Address()

    def listen(self, address: Address) -> Address:
        """Take connections at `address`; the address with its real port.

        Raises:
            CannotListen: it is taken, or not of this machine.
        """
        self._address = self._hub.listen(address)
        return self._address

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
        self._hub.close(say.THE_END if self._ending else "the master closes")
        self._employer.close()

    def _on_event(self, event: Any) -> None:
        if isinstance(event, Sent):
            return  # what was sent is left alone until nobody refers to it
        if isinstance(event, Message):
            self._on_message(event.peer, event.header, event.buffers)
        elif isinstance(event, Opened):
            self._origins[event.peer] = event.origin
        elif isinstance(event, Closed):
            self._on_closed(event.peer)
        elif isinstance(event, Refused):
            self._setting.tell(f"turned away {event.origin}: {event.reason}")
        self._drain()

    def _on_closed(self, peer: int) -> None:
        self._origins.pop(peer, None)
        self._lengths.pop(peer, None)
        self._employer.left(peer)
        member = self._members.disconnect(peer)
        if member is not None:
            self._decide("disconnected", member)

    def _on_message(self, peer: int, header: Letter, buffers: Sequence[memoryview]) -> None:
        if isinstance(header, Contribution) and self._lengths.get(peer):
            return  # it was dealt with when its last byte came
        member = self._members.at(peer)
        if member is not None:
            self._hear(member)
            if type(header) in _OF_NODES:
                _OF_NODES[type(header)](self, member, header)
                return
        if type(header) in _OF_ANYBODY:
            _OF_ANYBODY[type(header)](self, peer, header, buffers)
        elif not isinstance(header, say.Beat):
            self._hub.disconnect(peer, "it has to join first")

    def _on_join(self, peer: int, join: say.Join, _: object) -> None:
        reception = receive(join, self._setting.versions, time.time())
        decisions: tuple[Decision, ...] = ()
        if not reception.refusal:
            decisions = self._members.decide("joined", join.name, join.incarnation, self._clock())
        reasons = [reception.refusal, *(one.reason for one in decisions if one.verdict == "dismiss")]
        if any(reasons):
            self._turn_away(peer, next(filter(None, reasons)))
            return
        for remark in reception.remarks:
            self._setting.tell(f"warning: {remark}")
        earlier = self._members.connect(
            Member(join.name, join.incarnation, peer, self._origins[peer], join.device, join.profile, join.run)
        )
        if earlier is not None:
            self._turn_away(earlier, "a later process of that name has taken its place")
        self._hub.send(peer, say.Welcome(patience=self._setting.patience, remarks=reception.remarks))
        self._follow(decisions)

    def _on_profiled(self, member: Member, header: say.Profiled) -> None:
        member.profile = header.profile
        profiles = [one.profile for one in self._members.by_name.values() if one.profile is not None]
        write_noun(ClusterProfile(devices=tuple(profiles)), self._setting.home.profile)
        if self._members.is_present(member.name):
            self._employer.take_in(member.name)

    def _on_beat(self, member: Member, header: say.Beat) -> None:
        member.peak_memory_bytes = header.peak_memory_bytes

    def _on_leave(self, member: Member, _: say.Leave) -> None:
        self._decide("goodbye", member)

    def _on_ready(self, member: Member, header: say.Ready) -> None:
        self._employer.ready(member, header.run, header.unit_seconds)

    def _on_unfit(self, member: Member, header: say.Unfit) -> None:
        self._employer.unfit(member, header.run, header.reason)

    def _on_contribution(self, member: Member, header: Contribution) -> None:
        """One without any bytes."""
        if self._employer.run is not None:
            self._employer.run.contribute(member.name, header, 0)

    def _on_assessed(self, _: Member, header: say.Assessed) -> None:
        if self._employer.run is not None:
            self._employer.run.assessed(header)

    def _on_fetch(self, peer: int, header: say.Fetch, _: object) -> None:
        self._employer.fetch(peer, header)

    def _on_chunk(self, peer: int, header: say.Chunk, buffers: Sequence[memoryview]) -> None:
        self._employer.chunk(peer, header, buffers[0] if buffers else memoryview(b""))

    def _on_submit(self, peer: int, _: say.Submit, buffers: Sequence[memoryview]) -> None:
        self._employer.submit(peer, buffers)

    def _on_watch(self, peer: int, header: say.Watch, _: object) -> None:
        self._employer.watch(peer, header.run)

    def _on_stop(self, _: int, header: say.Stop, __: object) -> None:
        self._employer.stop(header)

    def _on_ask(self, peer: int, _: say.Ask, __: object) -> None:
        run, now = self._employer.run, self._clock()
        nodes = node_states(self._members.by_name, self._members.roster, run.ledger if run else None, now)
        situation = Situation(address=str(self._address), nodes=nodes, run=self._employer.state())
        self._hub.send(peer, say.Overview(), (encode_situation(situation),))

    def _on_down(self, _: int, __: say.Down, ___: object) -> None:
        """End the run and the nodes; each may finish its step, or come back, for as long as the patience."""
        farewell = say.Farewell(reason="`evener down` was typed", is_error=False)
        if self._employer.run is not None:
            self._employer.settle(Interrupted(f"stopped: {farewell.reason}"))
        for peer in self._members.peers:
            self._hub.send(peer, farewell)
        missing, until = self._members.missing, self._clock() + self._setting.patience
        while (self._members.peers or missing) and self._clock() < until:
            for event in self._hub.poll(_TICK_SECONDS):
                if isinstance(event, Closed):
                    self._members.disconnect(event.peer)
                elif isinstance(event, Message) and isinstance(event.header, say.Join):
                    self._hub.send(event.peer, farewell)
                    missing.discard(event.header.name)
        self._ending = True

    def _turn_away(self, peer: int, reason: str) -> None:
        self._hub.send(peer, say.Farewell(reason=reason, is_error=True))
        self._hub.disconnect(peer, reason)

    def _place(self, peer: int, header: Letter, lengths: tuple[int, ...]) -> Sequence[Buffer] | None:
        """Where the hub puts the buffers of a frame."""
        if isinstance(header, Contribution):
            return self._place_contribution(peer, header, lengths)
        is_parcel = isinstance(header, say.Chunk) and sum(lengths) <= CHUNK_BYTES
        if lengths and not is_parcel and not isinstance(header, say.Submit):
            raise BadFrame(f"{type(header).__name__} brings {sum(lengths)} bytes too many")
        return allocate(header, lengths)

    def _place_contribution(
        self, peer: int, header: Contribution, lengths: tuple[int, ...]
    ) -> Sequence[Buffer] | None:  # fmt: skip
        self._lengths[peer] = sum(lengths)
        member, run = self._members.at(peer), self._employer.run
        if member is None:
            raise BadFrame("it has to join first")
        if run is None or len(lengths) != 1:
            return None
        inbox = run.inbox(member.name, header, lengths[0])
        return None if inbox is None else (inbox,)

    def _on_part(self, peer: int, header: Letter, received: int) -> None:
        member, run = self._members.at(peer), self._employer.run
        if member is None:
            return
        self._hear(member)
        if not isinstance(header, Contribution) or run is None:
            return
        if received < self._lengths[peer]:
            run.arrived(member.name, header, received)
        else:
            run.contribute(member.name, header, received)
            self._drain()

    def _hear(self, member: Member) -> None:
        self._follow(self._members.hear(member, self._clock()))

    def _decide(self, what: What, member: Member) -> None:
        self._follow(self._members.decide(what, member.name, member.incarnation, self._clock()))

    def _drain(self) -> None:
        """Have membership decide upon what the run has learnt of nodes, then open its next round."""
        run = self._employer.run
        if run is None:
            return
        while run.happenings:
            what, name = run.happenings.popleft()
            self._decide(what, self._members.by_name[name])
        if run.server.version + 1 != self._members.roster.round:
            self._members.open_round(run.server.version + 1, self._clock())

    def _follow(self, decisions: Iterable[Decision]) -> None:
        """Do what membership has decided."""
        for decision in decisions:
            self._setting.tell(str(decision))
            if self._employer.run is not None:
                self._employer.run.note(EVENTS[decision.verdict], f"node {decision.node}: {decision.reason}")
            self._do(decision)

    def _do(self, decision: Decision) -> None:
        name, verdict = decision.node, decision.verdict
        is_gone = verdict == "pass over" and not self._members.is_present(name)  # else its update was bad, no more
        if is_gone or verdict in ("replace", "bench", "wait", "release"):
            self._employer.lose(name)
        if verdict in ("admit", "resume", "replace", "take back"):
            self._employer.take_in(name)
        elif verdict in ("bench", "wait"):
            self._employer.send(name, say.Bench(seconds=decision.seconds, reason=decision.reason))
        elif verdict == "dismiss":
            member = self._members.by_name.get(name)
            if member is not None and member.peer is not None:
                self._turn_away(member.peer, decision.reason)

    def _tick(self) -> None:
        now = self._clock()
        if now - self._ticked < _TICK_SECONDS:
            return
        self._ticked = now
        self._follow(self._members.tick(now))
        self._employer.tick(now)
        self._drain()
        if now - self._beaten >= min(_LONGEST_INTERVAL, self._setting.patience / _BEATS):
            self._beaten = now
            for peer in self._hub.peers:
                self._hub.send(peer, say.Beat())


_OF_NODES: dict[type[Letter], Callable[[Master, Member, Any], None]] = {
    say.Profiled: Master._on_profiled,
    say.Beat: Master._on_beat,
    say.Leave: Master._on_leave,
    say.Ready: Master._on_ready,
    say.Unfit: Master._on_unfit,
    Contribution: Master._on_contribution,
    say.Assessed: Master._on_assessed,
}
_OF_ANYBODY: dict[type[Letter], Callable[[Master, int, Any, Sequence[memoryview]], None]] = {
    say.Join: Master._on_join,
    say.Fetch: Master._on_fetch,
    say.Chunk: Master._on_chunk,
    say.Submit: Master._on_submit,
    say.Watch: Master._on_watch,
    say.Stop: Master._on_stop,
    say.Ask: Master._on_ask,
    say.Down: Master._on_down,
}
