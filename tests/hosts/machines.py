"""Several hosts on one machine, each with a network address, a link and processors of its own.

    with Hosts.build([Host(name="a", mbit=100), Host(name="b", cores=0.5)], folder=tmp_path) as hosts:
        server = hosts["a"].start(["python", "-m", "http.server"])
        hosts["b"].cut()

Whichever way the block is left, every process has ended then, and nothing of the hosts is left.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hosts import groups, network, process
from hosts.names import new_run
from hosts.network import Link
from hosts.process import Process
from hosts.removal import remove, sweep, uninterrupted


@dataclass(frozen=True, kw_only=True)
class Host:
    """What to build.

    Attributes:
        name: letters, digits and dashes; its processes see it as the machine's name.
        mbit: megabits a second, each way, that its link carries at most, headers included; None does not limit.
        up_mbit: likewise for what it sends, if that differs.
        cores: that its processes get together, at least 0.1; None does not limit.
        memory_bytes: likewise.
    """

    name: str
    mbit: float | None = None
    up_mbit: float | None = None
    cores: float | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]*", self.name), f"not a host's name: {self.name!r}"
        assert self.cores is None or self.cores >= 0.1, f"a quota is at least 0.1 cores, got {self.cores}"


@dataclass
class Machine:
    """A host that has been built."""

    name: str
    link: Link
    groups: Sequence[Path]
    folder: Path
    processes: list[Process] = field(default_factory=list)

    @property
    def address(self) -> str:
        """At which the other hosts reach it."""
        return self.link.address

    def start(
        self, command: Sequence[str], *, cwd: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> Process:
        """Start `command` here, in the folder `cwd`, with `environment` added to this process's."""
        started = process.start(
            command,
            host=self.name,
            namespace=self.link.namespace,
            groups=self.groups,
            output=self.folder / f"{self.name}-{len(self.processes) + 1}.txt",
            cwd=cwd,
            environment=environment or {},
        )
        self.processes.append(started)
        return started

    def cut(self) -> None:
        """Pull the cable: nothing reaches it or leaves it any more, and nobody is told."""
        self.link.switch("down")

    def cut_from(self, other: Machine) -> None:
        """Cut the line between this host and one other; both reach all the rest."""
        self.link.sever(other.link)
        other.link.sever(self.link)

    def join_with(self, other: Machine) -> None:
        """Let the line between this host and the other one work again."""
        self.link.mend(other.link)
        other.link.mend(self.link)

    def mute(self) -> None:
        """Lose everything that it sends, and nothing that it receives, until `join`."""
        self.link.mute()

    def join(self) -> None:
        """Put the cable back; a host that was muted is heard again, without a limit."""
        self.link.switch("up")
        self.link.unmute()

    def limit(self, mbit: float | None, up_mbit: float | None = None) -> None:
        """Limit its link from now on, as `Host` does."""
        self.link.limit(mbit if up_mbit is None else up_mbit, mbit)

    def carry(self, mtu: int) -> None:
        """Have its link carry packets of so many bytes."""
        self.link.carry(mtu)


class Hosts(dict[str, Machine]):
    """The machines by name."""

    @property
    def processes(self) -> list[Process]:
        """That were started on any of them."""
        return [started for machine in self.values() for started in machine.processes]

    @classmethod
    @contextmanager
    def build(cls, hosts: Sequence[Host], folder: Path) -> Iterator[Hosts]:
        """Inside, the hosts are there.

        Args:
            hosts: of different names.
            folder: for the output of their processes, which an exception brings along as notes.
        """
        sweep()
        name, built = new_run(), cls()
        try:
            network.make_switch(name)
            for number, host in enumerate(hosts, 1):
                built[host.name] = _build(host, Link(name, host.name, number), folder)
            yield built
        except BaseException as error:
            for started in built.processes:
                error.add_note(started.transcript())
            raise
        finally:
            with uninterrupted():
                for started in built.processes:
                    started.kill()
                remove(name)


def why_not() -> str | None:
    """Why hosts cannot be built here, in words; None if they can."""
    if os.geteuid() != 0:
        return "building hosts needs root"
    missing = [word for word in ("ip", "tc", "nsenter", "unshare") if shutil.which(word) is None]
    if missing:
        return f"building hosts needs the commands {', '.join(missing)} (packages iproute2 and util-linux)"
    probe = subprocess.run(
        ["unshare", "--net", "--uts", "sh", "-ec", network.PROBE],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    if probe.returncode:
        return f"building hosts needs namespaces, veth, bridge and tbf of the kernel: {probe.stderr.strip()}"
    absent = {"cpu", "memory"} - {controller.name for controller in groups.controllers()}
    if absent:
        return f"building hosts needs control groups for {' and '.join(sorted(absent))} that can be written"
    return None


def _build(host: Host, link: Link, folder: Path) -> Machine:
    link.make()
    amounts = {"cpu": host.cores, "memory": host.memory_bytes}
    limits = [
        controller.make(link.namespace.name, amount)
        for controller in groups.controllers()
        if (amount := amounts[controller.name]) is not None
    ]
    machine = Machine(host.name, link, limits, folder)
    machine.limit(host.mbit, host.up_mbit)
    return machine
