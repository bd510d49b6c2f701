"""What is wrong between machines that are to train together: pure, from what each says of itself to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from evener.doctor.facts import NetworkFacts
from evener.doctor.finding import Finding, found
from evener.doctor.interface_checks import gloo_interface, why_loopback
from evener.schema import Count, Finite, Name, Part, Word

CLOCK_SECONDS = 3.0
"""By which two clocks may differ without a word."""


class Unreached(Part, frozen=True, kw_only=True):
    """An attempt to connect to another machine that failed.

    Attributes:
        machine: of the other one.
        address: at which it listened.
        port: likewise.
        reason: what the system said.
    """

    machine: Name
    address: Name
    port: Count
    reason: Name


class PeerFacts(Part, frozen=True, kw_only=True):
    """What a machine says of itself to those that it is to train with.

    Attributes:
        machine: its name.
        evener, python, torch: versions; torch is empty where it is not installed.
        ahead: seconds by which its clock is ahead of the first machine's.
        network: how it is reached.
        uses_gloo: whether Gloo carries tensors.
        unreached: the others that it could not connect to.
    """

    machine: Name
    evener: Word
    python: Word
    torch: Word
    ahead: Finite
    network: NetworkFacts
    uses_gloo: bool = True
    unreached: tuple[Unreached, ...] = ()


def check_peers(peers: Sequence[PeerFacts]) -> list[Finding]:
    """All that is wrong between these machines, the first of which the others are held against."""
    return [finding for check in _CHECKS for finding in check(peers)]


def _check_versions(peers: Sequence[PeerFacts]) -> Iterator[Finding]:
    first = peers[0]
    for peer in peers[1:]:
        for what, theirs, ours in (
            ("Evener", peer.evener, first.evener),
            ("Python", minor(peer.python), minor(first.python)),
            ("PyTorch", minor(peer.torch), minor(first.torch)),
        ):
            if theirs != ours:
                yield found(
                    peer.machine, "versions", "error" if what == "Evener" else "warning",
                    f"it runs {what} {theirs or '(none)'}, {first.machine} {ours or '(none)'}",
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
    """Gloo tells the others an address; a loopback's leads them to themselves, and they would wait for ever."""
    for peer in peers:
        taken, route = gloo_interface(peer.network), peer.network.route
        if peer.uses_gloo and route is not None and (taken is None or taken.is_loopback):
            yield found(
                peer.machine, "interface", "error", f"Gloo would take the loopback there: {why_loopback(peer.network)}",
                f"set GLOO_SOCKET_IFNAME={route.name} on it",
            )  # fmt: skip


def _check_reach(peers: Sequence[PeerFacts]) -> Iterator[Finding]:
    for peer in peers:
        for other in peer.unreached:
            yield found(
                f"{peer.machine}, {other.machine}"[:256], "port", "error",
                f"{peer.machine} cannot connect to {other.machine} at {other.address}, port {other.port} "
                f"({other.reason})",
                f"let the firewall of {other.machine} pass TCP from {peer.machine} to all ports, for the system "
                "chooses them; or is the address the wrong interface's?",
            )  # fmt: skip


def minor(version: str) -> str:
    """`3.12` of `3.12.1`: versions that differ behind that fit together."""
    return ".".join(version.split(".")[:2])


_CHECKS: Sequence[Callable[[Sequence[PeerFacts]], Iterator[Finding]]] = (
    _check_versions,
    _check_clocks,
    _check_mtu,
    _check_interfaces,
    _check_reach,
)
