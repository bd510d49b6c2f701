"""The nodes of a system description (a ClusterProfile): names, addresses and speeds of the nodes that may join."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from evener.records.errors import InvalidInput
from evener.records.profile import ClusterProfile, DeviceProfile
from evener.records.schema import read_noun
from evener.wire.identity import host_in


class System(NamedTuple):
    """The nodes that a file describes.

    Attributes:
        file: name of the file, for messages.
        devices: devices by name of the node; the first one of a node with several devices.
        origins: IP addresses that a node may connect from, by its name; empty: any.
    """

    file: str
    devices: Mapping[str, DeviceProfile]
    origins: Mapping[str, frozenset[str]]

    def why_not(self, name: str, origin: str) -> str:
        """Say why a node `name` that connects from `origin` (`Address.description`) may not join; empty if it may."""
        if name not in self.devices:
            return f"{self.file} describes no node {name}, but {', '.join(self.devices)}: choose one with --name"
        allowed, host = self.origins[name], host_in(origin)
        if allowed and host not in allowed:
            return f"{self.file} says that node {name} is at {self.devices[name].address}, and this one is at {host}"
        return ""

    def missing(self, here: Sequence[str]) -> list[str]:
        """Return the nodes that are not `here`."""
        return [name for name in self.devices if name not in here]

    def score(self, name: str) -> float | None:
        """Return GFLOP/s of float32 matrix products of a node; None if the file does not say."""
        device = self.devices.get(name)
        throughput = None if device is None else device.throughput("fp32")
        return None if throughput is None or throughput.matmul_flops is None else throughput.matmul_flops / 1e9


def read_system(path: Path) -> System:
    """Read the system that a file describes.

    Raises:
        MissingFile, InvalidFile: the file does not exist, or is not a system description.
        InvalidInput: an address in it cannot be resolved here.
    """
    devices: dict[str, DeviceProfile] = {}
    for device in read_noun(path, ClusterProfile).devices:
        devices.setdefault(device.node, device)
    return System(path.name, devices, {name: _origins(path, device) for name, device in devices.items()})


def _origins(path: Path, device: DeviceProfile) -> frozenset[str]:
    """Resolve an address to IP addresses; none for an empty one."""
    if not device.address:
        return frozenset()
    try:
        infos = socket.getaddrinfo(device.address, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no valid name"
        raise InvalidInput(
            f"{path} says that node {device.node} is at {device.address}, which has no IP address: {why}"
        ) from error
    return frozenset(str(place[0]) for *_, place in infos)
