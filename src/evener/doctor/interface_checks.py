"""Which network interface Gloo and NCCL will take on a machine, and whether others reach it there.

Gloo takes what $GLOO_SOCKET_IFNAME names; else the first address that the machine's own name stands for; and if that is
none of the machine's, the loopback. Under Debian and Ubuntu and in many images the name stands for a loopback address,
which every machine has: the others would call themselves. There Evener sets the variable (launch/torchrun.py) to the
interface that leads to the others. NCCL takes what $NCCL_SOCKET_IFNAME names; else InfiniBand's, then any that is
neither a container's bridge nor the loopback.
"""

from __future__ import annotations

from collections.abc import Iterator

from evener.doctor.facts import Interface, MachineFacts, NetworkFacts
from evener.doctor.finding import Finding, found

LEAST_MTU = 1280
"""Bytes of a packet that every IPv6 network has to carry."""


def gloo_interface(network: NetworkFacts) -> Interface | None:
    """Return the interface that Gloo takes in a run of Evener over several machines; None if it finds none."""
    if network.gloo_interfaces:
        chosen = network.named(_first_name(network.gloo_interfaces))
        return chosen if chosen is not None and chosen.is_up else None
    named = next(filter(None, map(network.at, network.host_addresses)), None)
    return network.route if named is None or named.is_loopback else named


def listening_addresses(network: NetworkFacts, *, uses_gloo: bool = True) -> tuple[str, ...]:
    """Addresses at which the others have to reach a machine: of its way to them, and of what Gloo takes."""
    taken = gloo_interface(network) if uses_gloo else None
    others = taken.addresses[:1] if taken is not None and not taken.is_loopback else ()
    return tuple(dict.fromkeys((network.route_address, *others)))


def nccl_interfaces(network: NetworkFacts) -> tuple[str, ...]:
    """The interfaces among which NCCL takes one; empty if there is none."""
    wish = network.nccl_interfaces
    is_not, is_exact = wish.startswith("^"), wish.startswith(("=", "^="))
    names = wish.lstrip("^=").split(",") if wish else []
    usable = [one.name for one in network.interfaces if one.is_up and one.addresses]
    if names:
        chosen = {one for one in usable if any(one == name if is_exact else one.startswith(name) for name in names)}
        return tuple(name for name in usable if (name in chosen) != is_not)
    first = [name for name in usable if name.startswith("ib")]
    others = [name for name in usable if not name.startswith(("docker", "lo"))]
    return tuple(first or others or usable)


def check_name(facts: MachineFacts) -> Iterator[Finding]:
    """Whether the variables name interfaces that are there."""
    network = facts.network
    for variable, wish, is_missing in (
        ("GLOO_SOCKET_IFNAME", network.gloo_interfaces, gloo_interface(network) is None),
        ("NCCL_SOCKET_IFNAME", network.nccl_interfaces, not nccl_interfaces(network)),
    ):
        if wish and is_missing:
            known = ", ".join(one.name for one in network.interfaces if one.is_up and one.addresses) or "none"
            yield found(
                facts.machine, "interface", "error", f"${variable} is {wish}, and no interface of that name is up",
                f"set it to one of these, or unset it: {known}",
            )  # fmt: skip


def check_address(facts: MachineFacts) -> Iterator[Finding]:
    """Whether other machines reach what Gloo takes."""
    network, taken = facts.network, gloo_interface(facts.network)
    route = network.route
    if route is None or route.is_loopback:
        yield found(
            facts.machine, "interface", "warning", "no network interface leads to other machines",
            "plug the cable in or start the network, unless this machine trains alone",
        )  # fmt: skip
        return
    cure = f"set GLOO_SOCKET_IFNAME={route.name} in every shell that starts ranks here"
    if network.gloo_interfaces and taken is None:
        return  # said by its name
    if taken is None or taken.is_loopback:
        yield found(
            facts.machine, "interface", "warning", "Gloo will take the loopback: $GLOO_SOCKET_IFNAME says so", cure
        )
    elif taken.name != route.name:
        by = "$GLOO_SOCKET_IFNAME says so" if network.gloo_interfaces else "this machine's name stands for it"
        yield found(
            facts.machine, "interface", "warning",
            f"Gloo will take {taken.name} ({', '.join(taken.addresses)}), for {by}; the way to the others is "
            f"{route.name} ({network.route_address})",
            cure,
        )  # fmt: skip
    else:
        yield found(facts.machine, "interface", "ok", f"Gloo takes {taken.name} ({network.route_address})")


def check_mtu(facts: MachineFacts) -> Iterator[Finding]:
    """Whether packets are as large as everybody may expect."""
    route = facts.network.route
    if route is None or route.is_loopback:
        return
    if route.mtu < LEAST_MTU:
        yield found(
            facts.machine, "MTU", "warning", f"{route.name} sends packets of {route.mtu} bytes at most",
            f"`ip link set dev {route.name} mtu 1500`, unless a tunnel needs less",
        )  # fmt: skip
    else:
        yield found(facts.machine, "MTU", "ok", f"{route.name} sends packets of up to {route.mtu} bytes")


def _first_name(names: str) -> str:
    return names.partition(",")[0].strip()
