"""What is known of the machine: versions, the processor's name, the address at which others reach it."""

from __future__ import annotations

import platform
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

import evener
from evener.system.host import cpu_model, environment, own_address, version_of


def test_version_of_a_missing_package_is_empty() -> None:
    assert version_of("evener") == evener.__version__
    assert version_of("torch") == torch.__version__
    assert version_of("no_such_package") == ""


def test_environment_has_all_versions_and_names() -> None:
    facts = environment()
    assert facts["evener"] == evener.__version__
    assert facts["python"] == platform.python_version()
    assert all(facts[name] for name in ("torch", "os", "host", "cpu"))


def test_cpu_model_is_read_from_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Fast: 9000\nmodel name\t: Other\n")
    assert cpu_model(tmp_path / "cpuinfo") == "Fast: 9000"
    assert cpu_model(tmp_path / "nothing")


def test_own_address_towards_loopback_is_loopback() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"


def test_own_address_without_a_route_is_that_of_an_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NoWay(socket.socket):
        def connect(self, _address: object) -> None:
            raise OSError("Network is unreachable")

    def entry(address: str) -> object:
        return SimpleNamespace(family=socket.AF_INET, address=address)

    monkeypatch.setattr(socket, "socket", NoWay)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [entry("127.0.0.1")], "eth0": [entry("10.1.2.3")]})
    assert own_address() == "10.1.2.3"
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [entry("127.0.0.1")]})
    assert own_address() == "127.0.0.1"
