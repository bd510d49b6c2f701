"""Network namespaces joined by a switch, each over a link of its own rate that can be cut.

    namespace of host 1: eth0 10.73.0.1 --- veth --- port1 |
    namespace of host 2: eth0 10.73.0.2 --- veth --- port2 | bridge, in the namespace of the switch

What a host sends is limited where it leaves eth0, what it receives where it leaves the port. A link is cut at the port:
the host's packets vanish, as when somebody pulls a cable, and no connection is told.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_NAMESPACES = Path("/run/netns")
_SWITCH = "_switch"
_BUCKET_SECONDS = 0.005
_SMALLEST_BUCKET = 10_000
_QUEUE = "400ms"
"""Long enough that one connection fills the link: with 100 ms its bursts were dropped, one transfer in ten stalled."""

PROBE = """
ip link add name switch type bridge
ip link add name eth0 type veth peer name port
tc qdisc add dev eth0 root tbf rate 1mbit burst 10000 latency 100ms
"""
"""Shell commands that fail, in a namespace that vanishes after them, where hosts cannot be built."""


def run(*words: str) -> str:
    """What a command prints; it does not get the terminal's Ctrl-C.

    Raises:
        RuntimeError: it failed; says how.
    """
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False, start_new_session=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed: {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True)
class Link:
    """A host's namespace and its link to the switch.

    Attributes:
        name: of the set of hosts that this one belongs to.
        host: name.
        number: of the host, from 1.
    """

    name: str
    host: str
    number: int

    @property
    def address(self) -> str:
        """Of the host."""
        return f"10.73.0.{self.number}"

    @property
    def namespace(self) -> Path:
        """File that stands for the namespace."""
        return _NAMESPACES / f"{self.name}.{self.host}"

    def make(self) -> None:
        """Build the namespace, and the link to the switch, which must be there."""
        inside, switch = self.namespace.name, f"{self.name}.{_SWITCH}"
        run("ip", "netns", "add", inside)
        run(
            "ip",
            "-n",
            inside,
            "link",
            "add",
            "name",
            "eth0",
            "type",
            "veth",
            "peer",
            "name",
            self._port,
            "netns",
            switch,
        )
        run("ip", "-n", inside, "address", "add", f"{self.address}/24", "dev", "eth0")
        run("ip", "-n", inside, "link", "set", "dev", "lo", "up")
        run("ip", "-n", inside, "link", "set", "dev", "eth0", "up")
        run("ip", "-n", switch, "link", "set", "dev", self._port, "master", "switch", "up")

    def switch(self, state: str) -> None:
        """Set the link "up" or "down"."""
        run("ip", "-n", f"{self.name}.{_SWITCH}", "link", "set", "dev", self._port, state)

    def sever(self, other: Link) -> None:
        """Send what is meant for another host to nobody: it vanishes, as where the line between the two is cut."""
        away = ["lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent"]
        run("ip", "-n", self.namespace.name, "neigh", "replace", other.address, *away)

    def mend(self, other: Link) -> None:
        """Let packets to another host pass again."""
        run("ip", "-n", self.namespace.name, "neigh", "del", other.address, "dev", "eth0")

    def mute(self) -> None:
        """Drop every packet that leaves the host."""
        run("tc", "-n", self.namespace.name, "qdisc", "replace", "dev", "eth0", "root", "pfifo", "limit", "0")

    def unmute(self) -> None:
        """Let packets leave the host again, if it was muted."""
        if "pfifo" in run("tc", "-n", self.namespace.name, "qdisc", "show", "dev", "eth0"):
            _shape(self.namespace.name, "eth0", None)

    def limit(self, up_mbit: float | None, down_mbit: float | None) -> None:
        """Let at most so many megabits a second leave the host and come to it; None does not limit."""
        _shape(self.namespace.name, "eth0", up_mbit)
        _shape(f"{self.name}.{_SWITCH}", self._port, down_mbit)

    def carry(self, mtu: int) -> None:
        """Let packets of up to so many bytes through, at both of its ends."""
        run("ip", "-n", f"{self.name}.{_SWITCH}", "link", "set", "dev", self._port, "mtu", str(mtu))
        run("ip", "-n", self.namespace.name, "link", "set", "dev", "eth0", "mtu", str(mtu))

    @property
    def _port(self) -> str:
        return f"port{self.number}"


def make_switch(name: str) -> None:
    """Build the namespace with the bridge that joins the hosts of this name."""
    namespace = f"{name}.{_SWITCH}"
    run("ip", "netns", "add", namespace)
    run("ip", "-n", namespace, "link", "add", "name", "switch", "type", "bridge")
    run("ip", "-n", namespace, "link", "set", "dev", "switch", "up")


def namespaces(prefix: str) -> list[str]:
    """Names of the namespaces that begin with `prefix`."""
    return sorted(path.name for path in _NAMESPACES.glob(f"{prefix}*"))


def processes_in(namespace: str) -> list[int]:
    """Ids of the processes in a namespace."""
    return [int(word) for word in run("ip", "netns", "pids", namespace).split()]


def delete(namespace: str) -> None:
    """Delete a namespace, and with it its devices."""
    run("ip", "netns", "delete", namespace)


def _shape(namespace: str, device: str, mbit: float | None) -> None:
    queue = ["noqueue"]
    if mbit is not None:
        bucket = max(_SMALLEST_BUCKET, int(mbit * 1e6 / 8 * _BUCKET_SECONDS))
        queue = ["tbf", "rate", f"{int(mbit * 1e6)}bit", "burst", str(bucket), "latency", _QUEUE]
    run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *queue)
