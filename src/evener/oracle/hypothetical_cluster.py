"""Profiles of hypothetical clusters: cards of the catalogue, in machines, on a network.

    what is assumed    source
    a card             its data sheet, and the fraction of it that training reaches (catalogue.py)
    NVLink             80 % of the data sheet, all links of a device together, as rings over a whole node use them
    PCIe               80 % of 16 lanes of PCIe 3.0: cards without peer access exchange through the host's memory
    Ethernet           94 % of the line rate after frame, IP and TCP headers; latency of a message through two kernels
    Wi-Fi              30 % of the line rate of two antennas on 80 MHz: half goes to contention and acknowledgements,
                       and traffic between two PCs crosses the air twice; latency through the access point
    InfiniBand         92 % of the line rate; latency of a message between GPUs of two nodes

These values are starting points: `evener benchmark` measures real machines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import combinations

from evener.oracle.catalogue import CARDS, Card
from evener.records.errors import InvalidValue, require, require_one_of
from evener.records.profile import ClusterProfile, Fabric, LinkProfile

MAX_DEVICES = 65536
"""Largest number of devices: a forecast for more takes minutes and gigabytes."""
_ITEM = re.compile(r"(?:([1-9]\d*)\s*x\s*)?([a-z][\w-]*)(?::([1-9]\d*))?")


@dataclass(frozen=True, kw_only=True)
class NodeKind:
    """A kind of machine.

    Attributes:
        devices: number of devices.
        card: model of each device.
        inside: link between its devices.
    """

    devices: int
    card: Card
    inside: Fabric


def _inside(name: str, alpha: float, bandwidth: float) -> Fabric:
    """Return the link between devices of a node; `bandwidth` is the sheet's, in one direction, bytes per second."""
    return Fabric(name=name, within="node", alpha=alpha, beta=1 / (0.8 * bandwidth))


def _network(name: str, alpha: float, bandwidth: float) -> Fabric:
    """Return a network of nodes on one switch, each with one port of `bandwidth` bytes per second."""
    return Fabric(name=name, within="leaf", alpha=alpha, beta=1 / bandwidth, shared_bandwidth=bandwidth)


_PCIE = _inside("PCIe 3.0", 10e-6, 15.75e9)
_NVLINK_4 = _inside("NVLink 4", 3e-6, 450e9)
NODES: Mapping[str, NodeKind] = {
    "v100-node": NodeKind(devices=4, card=CARDS["v100"], inside=_inside("NVLink 2", 3e-6, 150e9)),
    "a100-node": NodeKind(devices=8, card=CARDS["a100-80"], inside=_inside("NVLink 3", 3e-6, 300e9)),
    "h100-node": NodeKind(devices=8, card=CARDS["h100"], inside=_NVLINK_4),
    "h200-node": NodeKind(devices=8, card=CARDS["h200"], inside=_NVLINK_4),
    "b200-node": NodeKind(devices=8, card=CARDS["b200"], inside=_inside("NVLink 5", 3e-6, 900e9)),
}
"""Machines whose GPUs have direct links; other machines are written `rtx3090:2` and use PCIe."""
NETWORKS: Mapping[str, Fabric] = {
    "wifi5": _network("Wi-Fi 5, 867 Mbit/s", 2e-3, 0.3 * 0.867e9 / 8),
    "wifi6": _network("Wi-Fi 6, 1201 Mbit/s", 2e-3, 0.3 * 1.201e9 / 8),
    "100mbit": _network("100 Mbit/s Ethernet", 100e-6, 0.94 * 0.0125e9),
    "1gbe": _network("1 Gbit/s Ethernet", 50e-6, 0.94 * 0.125e9),
    "2.5gbe": _network("2.5 Gbit/s Ethernet", 50e-6, 0.94 * 0.3125e9),
    "5gbe": _network("5 Gbit/s Ethernet", 40e-6, 0.94 * 0.625e9),
    "10gbe": _network("10 Gbit/s Ethernet", 30e-6, 0.94 * 1.25e9),
    "25gbe": _network("25 Gbit/s Ethernet", 20e-6, 0.94 * 3.125e9),
    "100gbe": _network("100 Gbit/s Ethernet", 15e-6, 0.94 * 12.5e9),
    "infiniband": _network("InfiniBand EDR", 7e-6, 0.92 * 12.5e9),
}


def hypothetical_profile(machines: str, network: str = "10gbe", at_least: int = 0) -> ClusterProfile:
    """Return the profile of machines that are named, not measured.

    Args:
        machines: such as `4xv100-node,rtx3090:2,rtx4090`: four machines of a kind, one with two cards, one with one.
        network: the network between them, a key of `NETWORKS`.
        at_least: minimum number of devices; the last machine is repeated until it is reached.

    Raises:
        InvalidValue: a machine or the network is unknown.
    """
    kinds = [kind for item in machines.split(",") for kind in _nodes(item.strip())]
    missing = at_least - sum(kind.devices for kind in kinds)
    kinds += max(0, -(-missing // kinds[-1].devices)) * [kinds[-1]]
    require_one_of("--network", network, NETWORKS)
    slowest = max((kind.inside for kind in kinds), key=lambda fabric: fabric.beta)
    return ClusterProfile(
        devices=tuple(
            kind.card.profile(f"node-{index}", device)
            for index, kind in enumerate(kinds)
            for device in range(kind.devices)
        ),
        links=tuple(_faster_links(kinds, slowest)),
        fabrics=(slowest, NETWORKS[network]),
        environment={"source": f"imagined: {machines} on {network}"},
    )


def _faster_links(kinds: Sequence[NodeKind], slowest: Fabric) -> Iterator[LinkProfile]:
    """Yield the links inside nodes that are faster than `slowest`, which the profile states for all nodes."""
    first = 0
    for kind in kinds:
        if kind.inside != slowest:
            for source, target in combinations(range(first, first + kind.devices), 2):
                yield LinkProfile(source=source, target=target, alpha=kind.inside.alpha, beta=kind.inside.beta)
        first += kind.devices


def _nodes(item: str) -> list[NodeKind]:
    """Return the machines of one item of `--machines`."""
    match = _ITEM.fullmatch(item)
    if match is None:
        raise InvalidValue(
            "--machines", item, "such as 4xv100-node, or 2xrtx3090:4 for two machines with four cards each"
        )
    machines, cards, name = int(match[1] or 1), int(match[3] or 0), match[2]
    require(machines * max(1, cards) <= MAX_DEVICES, "--machines", item, f"{MAX_DEVICES} devices at most")
    _require_known(name, "card" if cards else "machine", [*CARDS] if cards else [*NODES, *CARDS])
    kind = NODES.get(name) or NodeKind(devices=max(1, cards), card=CARDS[name], inside=_PCIE)
    return machines * [kind]


def _require_known(name: str, what: str, known: Sequence[str]) -> None:
    """Raise InvalidValue with the nearest known names, because all names do not fit into a message."""
    if name not in known:
        near = ", ".join(get_close_matches(name, known) or known[:3])
        raise InvalidValue(f"a {what} of --machines", name, f"a name that `evener catalogue` prints, such as {near}")
