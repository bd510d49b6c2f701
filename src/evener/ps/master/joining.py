"""Admission of nodes: whether a node may join, its name, and the earlier process that it replaces."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from evener.doctor.peers import CLOCK_SECONDS, minor
from evener.ps.master.access.invitations import ASK_FOR_ANOTHER
from evener.ps.master.access.quotas import MAX_NAMES, require_small
from evener.ps.master.effects import Effects
from evener.ps.master.node_state import Transition
from evener.ps.master.nodes import NodeRecord, Nodes
from evener.ps.master.rate_limited_file import RateLimitedFile
from evener.ps.protocol.config import MasterConfig, Versions
from evener.ps.protocol.messages import PROTOCOL_VERSION, Join, Welcome
from evener.records.profile import ClusterProfile, DeviceProfile
from evener.records.schema import printable, write_noun
from evener.wire.errors import BadFrame
from evener.wire.identity import host_in

_MAX_NAME_LENGTH = 64


class Admission(NamedTuple):
    """The answer to a node.

    Attributes:
        refusal: why it may not join, with a remedy; empty if it may.
        remarks: sentences for its user.
    """

    refusal: str = ""
    remarks: tuple[str, ...] = ()


def admission_of(join: Join, here: Versions, now: float) -> Admission:
    """Return the answer to `join`.

    Args:
        join: message of the node.
        here: versions on the master.
        now: the master's clock, seconds since 1970.
    """
    if join.protocol != PROTOCOL_VERSION:
        return Admission(
            f"Evener {join.evener} on the node does not understand Evener {here.evener} on the master: "
            "install the same version on both"
        )
    is_printable = join.name.isprintable() and join.name == printable(join.name)
    if not is_printable or not 0 < len(join.name) <= _MAX_NAME_LENGTH or join.name != join.name.strip():
        return Admission(f"the name of a node must be 1 to {_MAX_NAME_LENGTH} printable characters, got {join.name!r}")
    return Admission(remarks=tuple(_remarks(join, here, now)))


def _remarks(join: Join, here: Versions, now: float) -> list[str]:
    """Return differences that may matter: results may differ in the last bit, and log times may not match."""
    remarks = []
    if abs(join.clock - now) > CLOCK_SECONDS:
        relation = "ahead of" if join.clock > now else "behind"
        seconds = abs(join.clock - now)
        remarks.append(f"the clock of node {join.name} is {seconds:.0f} s {relation} the master's: let both follow NTP")
    pairs = {
        "Evener": (join.evener, here.evener),
        "Python": (minor(join.python), minor(here.python)),
        "PyTorch": (minor(join.torch), minor(here.torch)),
    }
    for what, (theirs, ours) in pairs.items():
        if theirs and ours and theirs != ours:
            remarks.append(f"node {join.name} runs {what} {theirs}, the master {ours}")
    return remarks


class Joining:
    """Admits nodes.

    Args:
        config: configuration of the master.
        nodes: all nodes.
        effects: carries out what happens to nodes.
    """

    def __init__(self, config: MasterConfig, nodes: Nodes, effects: Effects) -> None:
        self._config, self._nodes, self._effects = config, nodes, effects
        self._profiles = RateLimitedFile(self._write_profiles, config.clock)

    def join(self, peer: int, origin: str, invitation: str, join: Join) -> None:
        """Admit a node, or tell it why not.

        Args:
            peer: connection of the node.
            origin: address that it connects from.
            invitation: invitation with which it joins; empty if it uses the token of all nodes.
            join: message of the node.
        """
        require_small(join.profile)
        join, admission = self._admission(join, origin, invitation)
        transitions: tuple[Transition, ...] = ()
        if not admission.refusal:
            node = self._nodes.record(join.name)
            if node.state is None or node.state.incarnation != join.incarnation:
                node.leaving_until = None
            transitions = self._nodes.decide("joined", node, self._config.clock(), join.incarnation)
        reasons = [admission.refusal, *(one.reason for one in transitions if one.kind == "dismiss")]
        if any(reasons):
            self._effects.turn_away(peer, next(filter(None, reasons)))
            return
        for remark in admission.remarks:
            self._config.notify(f"warning: {remark}")
        earlier = self._nodes.connect(node, peer)
        node.origin, node.device, node.profile, node.ready_for = origin, join.device, join.profile, join.run
        node.doing, node.peak_memory_bytes, node.steps, node.joined_at = "waits", 0, 0, self._config.clock()
        if earlier is not None:
            self._effects.turn_away(earlier, "a later process of that name has taken its place")
        self._effects.members.bind(node.name, join.key, invitation, host_in(origin))
        self._effects.audit.write("joined", name=node.name, address=node.origin, invitation=invitation)
        self._effects.welcome(peer, Welcome(patience=self._nodes.patience, remarks=admission.remarks, name=node.name))
        self._effects.follow(transitions)

    def profiled(self, node: NodeRecord, profile: DeviceProfile) -> None:
        """Note that a node has measured its device. Raises BadFrame: it had done so before."""
        if node.profile is not None:
            raise BadFrame("its device has been measured before")
        require_small(profile)
        node.profile = replace(profile, node=node.name, address=host_in(node.origin))
        self._saving(self._profiles.changed)

    def tick(self) -> None:
        """Write the files of members and profiles if that is due."""
        self._saving(self._effects.members.tick)
        self._saving(self._profiles.tick)

    def close(self) -> None:
        """Write the files of members and profiles."""
        self._saving(self._effects.members.flush)
        self._saving(self._profiles.flush)

    def _saving(self, write: Callable[[], None]) -> None:
        """Write, and report what fails: the master continues."""
        try:
            write()
        except OSError as error:
            self._config.notify(f"warning: {error.filename} cannot be written: {error.strerror}")

    def _write_profiles(self) -> None:
        profiles = [one.profile for one in self._nodes.by_name.values() if one.profile is not None]
        write_noun(ClusterProfile(devices=tuple(profiles)), self._config.home.profile)

    def _admission(self, join: Join, origin: str, invitation: str) -> tuple[Join, Admission]:
        """Return the message with the node's final name, and whether it may join."""
        admission = admission_of(join, self._config.versions, time.time())
        if admission.refusal:
            return join, admission
        if self._config.system is not None and (reason := self._config.system.why_not(join.name, origin)):
            return join, Admission(reason)
        members = self._effects.members
        if reason := members.why_expelled(join.name, join.key):
            return join, Admission(f"it was expelled: {reason}")
        if reason := self._why_uninvited(join, invitation):
            return join, Admission(reason)
        name = members.name_for(join.name, join.key, is_named=join.is_named)
        if not name:
            return join, Admission(
                f"the name {join.name} belongs to another node: choose another name with --name, "
                f"or have an admin type `evener nodes --forget {join.name}`"
            )
        if not self._nodes.has_room(name, self._config.clock()):
            return join, Admission(f"the master knows {MAX_NAMES} nodes, which is the limit")
        profile = None if join.profile is None else replace(join.profile, node=name)
        return replace(join, name=name, profile=profile), admission

    def _why_uninvited(self, join: Join, invitation: str) -> str:
        """Say why a node may not join with an invitation; empty if it may, or has none."""
        members = self._effects.members
        if not invitation or members.knows(join.key):
            return ""
        if not join.key:
            return "a node with an invitation needs a key"
        if reason := self._effects.invitations.why_not(invitation):
            return f"{reason}: {ASK_FOR_ANOTHER}"
        return "" if members.has_room else "the master cannot remember more keys of nodes"
