"""Checks between machines that are to train together: pure functions, from the facts of each to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from evener.doctor.facts import NetworkFacts
from evener.doctor.finding import Finding, found
from evener.doctor.interface_checks import gloo_interface
from evener.records.schema import Count, Finite, Name, Part, Word

CLOCK_SECONDS = 3.0
"""By which two clocks may differ without a word."""


class Unreached(Part, frozen=True, kw_only=True):
    """An attempt to connect to another machine that failed.

    Attributes:
        machine: of the other one.
        address: at which it listened.
        port: at which it listened.
        reason: what the system said.
    """

    machine: Name
    address: Name
    port: Count
    reason: Name


class Link(Part, frozen=True, kw_only=True):
    """A connection to another machine that was made, and what it carried.

    Attributes:
        machine: of the other one.
        seconds: that connecting took: there and back once.
        bytes_per_second: that came from there; 0 if it was not measured.
    """

    machine: Name
    seconds: Finite
    bytes_per_second: Finite = 0.0


class DataFacts(Part, frozen=True, kw_only=True):
    """The training data of a task, as a machine finds them.

    Attributes:
        samples: how many.
        fingerprint: what reads them, a colon, and what is another for other samples: data that PyTorch reads and those
            that NumPy reads cannot be compared.
    """

    samples: Count
    fingerprint: Name

    @property
    def kind(self) -> str:
        """The library that reads them."""
        return self.fingerprint.partition(":")[0]


class PeerFacts(Part, frozen=True, kw_only=True):
    """Facts of a machine for the machines that it is to train with.

    Attributes:
        machine: its name.
        evener, python, torch: versions; torch is empty where it is not installed.
        ahead: seconds by which its clock is ahead of the first machine's.
        network: how it is reached.
        uses_gloo: whether Gloo carries tensors.
        is_rank: whether the others have to connect to it; a master's nodes connect out to the master alone, with or
            without PyTorch.
        links: to the others, where they were measured.
        unreached: the others that it could not connect to.
        data: of the task, if it has looked for them.
    """

    machine: Name
    evener: Word
    python: Word
    torch: Word
    ahead: Finite
    network: NetworkFacts
    uses_gloo: bool = True
    is_rank: bool = True
    links: tuple[Link, ...] = ()
    unreached: tuple[Unreached, ...] = ()
    data: DataFacts | None = None


def check_peers(peers: Sequence[PeerFacts]) -> list[Finding]:
    """All that is wrong between these machines, the first of which the others are held against."""
    return [finding for check in _CHECKS for finding in check(peers)]


def _check_versions(peers: Sequence[PeerFacts]) -> Iterator[Finding]:
    for what, version in _VERSIONS.items():
        known = [peer for peer in peers if peer.is_rank or version(peer)]  # nodes of a master may have no PyTorch
        for peer in known[1:]:
            theirs, ours = version(peer), version(known[0])
            if theirs != ours:
                yield found(
                    peer.machine, "versions", "error" if what == "Evener" and peer.is_rank else "warning",
                    f"it runs {what} {theirs or '(none)'}, {known[0].machine} {ours or '(none)'}",
                    "install the same version on both",
                )  # fmt: skip


def _check_clocks(peers: Sequence[PeerFacts]) -> Iterator[Finding]:
    for peer in peers[1:]:
        if abs(peer.ahead) > CLOCK_SECONDS:
            relation = "ahead of" if peer.ahead > 0 else "behind"
            yield found(
                peer.machine, "clock", "warning",
                f"its clock is {abs(peer.ahead):.0f} s {relation} that of {peers[0].machine}",
                "let both follow NTP: `timedatectl set-ntp true`",
            )  # fmt: skip


def _check_mtu(peers: Sequence[PeerFacts]) -> Iterator[Finding]:
    routes = [(peer, peer.network.route) for peer in peers]
    known = [(peer, route) for peer, route in routes if route is not None and not route.is_loopback]
    for peer, route in known[1:]:
        first, other = known[0]
        if route.mtu != other.mtu:
            yield found(
                peer.machine, "MTU", "warning",
                f"{route.name} sends packets of {route.mtu} bytes, {other.name} of {first.machine} of {other.mtu}",
                f"give both the same: `ip link set dev {route.name} mtu {other.mtu}`",
            )  # fmt: skip


def _check_interfaces(peers: Sequence[PeerFacts]) -> Iterator[Finding]:
    """Gloo tells the others an address; a loopback's leads them to themselves, and they would wait for ever.

    Those of one address are one machine, of which each has ranks of its own: its loopback leads to all of them.
    """
    if len({peer.network.route_address for peer in peers}) == 1:
        return
    for peer in peers:
        taken, route = gloo_interface(peer.network), peer.network.route
        if peer.uses_gloo and route is not None and (taken is None or taken.is_loopback):
            yield found(
                peer.machine, "interface", "error", "Gloo would take the loopback there: $GLOO_SOCKET_IFNAME says so",
                f"set GLOO_SOCKET_IFNAME={route.name} on it",
            )  # fmt: skip


def _check_reach(peers: Sequence[PeerFacts]) -> Iterator[Finding]:
    for peer in peers:
        for other in peer.unreached:
            firewall = (
                f"let the firewall of {other.machine} pass TCP from {peer.machine} to all ports, for the system "
                "chooses them; or is the address the wrong interface's?"
            )
            yield found(
                f"{peer.machine}, {other.machine}"[:256], "port", "error" if peer.is_rank else "warning",
                f"{peer.machine} cannot connect to {other.machine} at {other.address}, port {other.port} "
                f"({other.reason})",
                firewall if peer.is_rank else f"a run with --agreement needs no such link, ranks do: {firewall}",
            )  # fmt: skip


def _check_links(peers: Sequence[PeerFacts]) -> Iterator[Finding]:
    for peer in peers:
        for link in peer.links:
            rate = f", and {_bits(link.bytes_per_second)} came" if link.bytes_per_second else ""
            yield found(
                f"{peer.machine}, {link.machine}"[:256], "link", "ok",
                f"{peer.machine} reaches {link.machine} in {link.seconds * 1e3:.1f} ms{rate}",
            )  # fmt: skip


def _bits(bytes_per_second: float) -> str:
    mbit = bytes_per_second * 8 / 1e6
    return f"{mbit / 1e3:.3g} Gbit/s" if mbit >= 999.5 else f"{mbit:.3g} Mbit/s"


def _check_data(peers: Sequence[PeerFacts]) -> Iterator[Finding]:
    """Each is held against the first whose data were read in the same way."""
    first: dict[str, tuple[str, DataFacts]] = {}
    for peer in peers:
        if (data := peer.data) is None:
            continue
        machine, ours = first.setdefault(data.kind, (peer.machine, data))
        if data != ours:
            are = "other samples"
            if data.samples != ours.samples:
                are = f"{data.samples} samples, and there {ours.samples}"
            yield found(
                peer.machine, "data", "error", f"its training data are not those of {machine}: {are}",
                "give both the same files, and seed what splits or shuffles them",
            )  # fmt: skip


def minor(version: str) -> str:
    """`3.12` of `3.12.1`: versions that differ behind that fit together."""
    return ".".join(version.split(".")[:2])


_VERSIONS: Mapping[str, Callable[[PeerFacts], str]] = {
    "Evener": lambda peer: peer.evener,
    "Python": lambda peer: minor(peer.python),
    "PyTorch": lambda peer: minor(peer.torch),
}
_CHECKS: Sequence[Callable[[Sequence[PeerFacts]], Iterator[Finding]]] = (
    _check_versions,
    _check_clocks,
    _check_mtu,
    _check_interfaces,
    _check_data,
    _check_links,
    _check_reach,
)
