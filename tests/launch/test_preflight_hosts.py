"""Faults between two machines, planted over network namespaces: each is named with its cure before the first step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hosts import Host, Hosts, Process, fixture, network
from hosts.machines import Machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
build_hosts = fixture.build_hosts


NAME_IS_LOOPBACK = 'echo "127.0.1.1 $(hostname)" > hosts-$$ && mount --bind hosts-$$ /etc/hosts && exec "$@"'
"""As Debian and Ubuntu have it; the file is mounted for the command alone."""


def start(hosts: Hosts, folder: Path, *words: str, enter: tuple[str, ...] = (), **variables: str) -> list[Process]:
    """Start the ranks of a run, one on each host, by the command `enter`."""
    return [
        machine.start(
            [*enter, sys.executable, "-m", "evener", "train", "digits", "--epochs", "1", "--output", str(folder / name),
             "--no-check", "--strategy", "data", *words],
            cwd=folder,
            environment={
                "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": hosts["ada"].address, "MASTER_PORT": "29400", "EVENER_SECRET": "a secret of the tests",
                "GLOO_SOCKET_IFNAME": "eth0", **variables,
            },
        )
        for rank, (name, machine) in enumerate(hosts.items())
    ]  # fmt: skip


def namespace(machine: Machine) -> str:
    return machine.link.namespace.name


def test_sound_machines_train(build_hosts: fixture.Build, tmp_path: Path) -> None:
    with build_hosts(Host(name="ada"), Host(name="bob")) as hosts:
        first, second = start(hosts, tmp_path)
        first.wait_for("measuring: 2 nodes", 120)
        assert second.is_running
        assert "preflight" not in first.text


@pytest.mark.parametrize("words", [(), ("--no-preflight",)])
def test_host_name_that_resolves_to_loopback_is_harmless(
    build_hosts: fixture.Build, tmp_path: Path, words: tuple[str, ...]
) -> None:
    enter = ("unshare", "--mount", "sh", "-c", NAME_IS_LOOPBACK, "sh")
    with build_hosts(Host(name="ada"), Host(name="bob")) as hosts:
        first, second = start(hosts, tmp_path, *words, enter=enter, GLOO_SOCKET_IFNAME="")
        assert first.wait(120) == 0, first.text
        assert second.wait(60) == 0, second.text
        assert "preflight" not in first.text
        assert "evener: bob/0 is rank 1 of 2; ada shows the run" in second.text
        assert "bob/0" in first.text


def test_unknown_host_name_is_harmless(build_hosts: fixture.Build, tmp_path: Path) -> None:
    with build_hosts(Host(name="ada"), Host(name="bob")) as hosts:
        for rank in start(hosts, tmp_path, GLOO_SOCKET_IFNAME=""):
            assert rank.wait(120) == 0, rank.text


def test_loopback_as_gloo_interface_is_an_error(build_hosts: fixture.Build, tmp_path: Path) -> None:
    with build_hosts(Host(name="ada"), Host(name="bob")) as hosts:
        for rank in start(hosts, tmp_path, GLOO_SOCKET_IFNAME="lo"):
            assert rank.wait(120) == 2
            assert "bob: Gloo would take the loopback there: $GLOO_SOCKET_IFNAME says so" in rank.text
            assert "set GLOO_SOCKET_IFNAME=eth0 on it" in rank.text


def test_different_mtu_gives_a_warning(build_hosts: fixture.Build, tmp_path: Path) -> None:
    with build_hosts(Host(name="ada"), Host(name="bob")) as hosts:
        network.run("ip", "-n", namespace(hosts["bob"]), "link", "set", "dev", "eth0", "mtu", "1000")
        first, second = start(hosts, tmp_path)
        first.wait_for("measuring: 2 nodes", 120)
        assert second.is_running
        assert "preflight: bob: eth0 sends packets of 1000 bytes, eth0 of ada of 1500" in first.text
