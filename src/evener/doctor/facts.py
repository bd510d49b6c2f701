"""Facts of a machine: read there by `examine`, checked anywhere. They may come from another machine."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from msgspec import Meta

from evener.records.schema import Count, Finite, Name, Part, Text, Word

Share = Annotated[float, Meta(ge=0, le=1e6)]
"""Of a core, a processor; more than one for several."""


class Interface(Part, frozen=True, kw_only=True):
    """A network interface.

    Attributes:
        name: `eth0`.
        addresses: IPv4 and IPv6.
        mtu: bytes of the largest packet that it sends.
        is_up: whether it can send.
    """

    name: Name
    addresses: tuple[Name, ...]
    mtu: Count
    is_up: bool

    @property
    def is_loopback(self) -> bool:
        """Whether it leads to this machine alone."""
        return bool(self.addresses) and all(map(is_loopback, self.addresses))


class NetworkFacts(Part, frozen=True, kw_only=True):
    """How a machine is reached.

    Attributes:
        interfaces: all of them.
        host_addresses: what the machine's own name stands for, the first first; empty if for nothing.
        route_address: of the interface by which it reaches the others.
        gloo_interfaces: what $GLOO_SOCKET_IFNAME says; empty if nothing.
        nccl_interfaces: what $NCCL_SOCKET_IFNAME says.
    """

    interfaces: tuple[Interface, ...]
    host_addresses: tuple[Name, ...]
    route_address: Name
    gloo_interfaces: Name = ""
    nccl_interfaces: Name = ""

    def at(self, address: str) -> Interface | None:
        """The interface that has an address; the loopback has all that begin with 127."""
        exact = (one for one in self.interfaces if address in one.addresses)
        others = (one for one in self.interfaces if one.is_loopback and is_loopback(address))
        return next(exact, None) or next(others, None)

    def named(self, name: str) -> Interface | None:
        """The interface of that name."""
        return next((one for one in self.interfaces if one.name == name), None)

    @property
    def route(self) -> Interface | None:
        """The interface by which the machine reaches the others."""
        return self.at(self.route_address)


class GpuFacts(Part, frozen=True, kw_only=True):
    """A GPU, as its driver tells.

    Attributes:
        name: of the model.
        driver: version.
        total_bytes, free_bytes: memory.
        is_hot: whether it slows down for its temperature.
    """

    name: Name
    driver: Name
    total_bytes: Count
    free_bytes: Count
    is_hot: bool


class FolderFacts(Part, frozen=True, kw_only=True):
    """A folder that runs write into.

    Attributes:
        purpose: what lies there, in words.
        path: of it, or of the nearest folder above it that is there.
        free_bytes: that its file system has for this user.
        has_inodes: whether another file can be made there.
        is_writable: by this user.
    """

    purpose: Name
    path: Text
    free_bytes: Count
    has_inodes: bool
    is_writable: bool


class LoadFacts(Part, frozen=True, kw_only=True):
    """Other load on the machine, over half a second.

    Attributes:
        cores: that this process may use.
        busy_cores: of these, by others.
        busiest: process that takes most: its name and id; empty if none is seen.
        busiest_cores: that it takes.
        stolen: share of the time that the host of a virtual machine gave to others.
        hot_cores: that were slowed down for their temperature meanwhile.
        quota: cores' worth of time that a control group allows this process; None if it allows all cores.
    """

    cores: Count
    busy_cores: Share
    busiest: Name = ""
    busiest_cores: Share = 0.0
    stolen: Share = 0.0
    hot_cores: Count = 0
    quota: Share | None = None


class MachineFacts(Part, frozen=True, kw_only=True):
    """A machine.

    Attributes:
        machine: its name.
        evener, python, torch: versions; torch is empty where it is not installed.
        processor: maker's name.
        clock: seconds since 1970.
        installed: seconds since 1970 when Evener's files were written: it is later than that.
        total_bytes, free_bytes: main memory that this process may use, control groups respected.
        machine_bytes: main memory of the whole machine.
        gpus: that the driver shows.
        visible_gpus: of these, left to the process by $CUDA_VISIBLE_DEVICES.
        gpu_problem: why the driver shows none, though it is there; empty otherwise.
        torch_gpus: that PyTorch can use; None if it was not asked.
        folders: that runs write into.
        network: how it is reached.
        load: what else it does.
        task_problem: why the task cannot be loaded there; empty if it can, None if there is none.
    """

    machine: Name
    evener: Word
    python: Word
    torch: Word
    processor: Text
    clock: Finite
    installed: Finite
    total_bytes: Count
    free_bytes: Count
    machine_bytes: Count
    gpus: tuple[GpuFacts, ...]
    visible_gpus: Count
    gpu_problem: Text
    torch_gpus: Count | None
    folders: tuple[FolderFacts, ...]
    network: NetworkFacts
    load: LoadFacts
    task_problem: Text | None = None


def is_loopback(address: str) -> bool:
    """Whether an address is reached from its own machine alone."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
