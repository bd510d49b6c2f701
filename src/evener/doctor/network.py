"""Reads how this machine is reached: its interfaces, and what its own name stands for."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

import psutil

from evener.doctor.facts import Interface, NetworkFacts
from evener.system.host import own_address
from evener.wire.errors import CannotResolve
from evener.wire.identity import Address
from evener.wire.resolve import resolve

_RESOLVE_SECONDS = 3.0
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def network_facts(environment: Mapping[str, str], host: str, towards: str | None = None) -> NetworkFacts:
    """How this machine is reached.

    Args:
        environment: variables.
        host: the machine's own name.
        towards: a host that it is to reach; None for any other.
    """
    return NetworkFacts(
        interfaces=interfaces(),
        host_addresses=_addresses_of(host),
        route_address=own_address() if towards is None else own_address(towards),
        gloo_interfaces=environment.get("GLOO_SOCKET_IFNAME", ""),
        nccl_interfaces=environment.get("NCCL_SOCKET_IFNAME", ""),
    )


def interfaces() -> tuple[Interface, ...]:
    """All of this machine, in the system's order."""
    addresses, statistics = psutil.net_if_addrs(), psutil.net_if_stats()
    return tuple(
        Interface(
            name=name,
            addresses=tuple(
                one.address.partition("%")[0] for one in addresses.get(name, ()) if one.family in _FAMILIES
            ),
            mtu=state.mtu,
            is_up=state.isup,
        )
        for name, state in statistics.items()
    )


def _addresses_of(host: str) -> tuple[str, ...]:
    """Return the addresses of a host name; empty if it cannot be resolved."""
    try:
        resolved = resolve(Address(host=host), time.monotonic() + _RESOLVE_SECONDS)
    except CannotResolve:
        return ()
    return tuple(dict.fromkeys(str(where[0]).partition("%")[0] for _, where in resolved))
