"""Faults between two machines, planted over network namespaces: each is named with its cure before the first step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hosts import Host, Hosts, Process, fixture, network
from hosts.machines import Machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
build_hosts = fixture.build_hosts


def start(hosts: Hosts, folder: Path, *words: str, **variables: str) -> list[Process]:
    """The ranks of a run, one on each host."""
    return [
        machine.start(
            [sys.executable, "-m", "evener", "train", "digits", "--epochs", "1", "--output", str(folder / name),
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


def test_the_loopback_as_gloo_s_interface_is_named(build_hosts: fixture.Build, tmp_path: Path) -> None:
    with build_hosts(Host(name="ada"), Host(name="bob")) as hosts:
        for rank in start(hosts, tmp_path, GLOO_SOCKET_IFNAME=""):
            assert rank.wait(120) == 2
            assert (
                "bob: Gloo would take the loopback there: nobody knows an address of this machine's name" in rank.text
            )
            assert "set GLOO_SOCKET_IFNAME=eth0 on it" in rank.text


def test_another_mtu_is_a_warning(build_hosts: fixture.Build, tmp_path: Path) -> None:
    with build_hosts(Host(name="ada"), Host(name="bob")) as hosts:
        network.run("ip", "-n", namespace(hosts["bob"]), "link", "set", "dev", "eth0", "mtu", "1000")
        first, second = start(hosts, tmp_path)
        first.wait_for("measuring: 2 nodes", 120)
        assert second.is_running
        assert "preflight: bob: eth0 sends packets of 1000 bytes, eth0 of ada of 1500" in first.text
