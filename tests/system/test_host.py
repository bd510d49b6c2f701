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


def test_versions_are_those_of_the_packages_and_of_nothing_is_empty() -> None:
    assert version_of("evener") == evener.__version__
    assert version_of("torch") == torch.__version__
    assert version_of("no_such_package") == ""


def test_the_environment_names_all_that_matters() -> None:
    facts = environment()
    assert facts["evener"] == evener.__version__
    assert facts["python"] == platform.python_version()
    assert all(facts[name] for name in ("torch", "os", "host", "cpu"))


def test_the_name_of_the_processor_comes_from_the_kernel_where_it_tells(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Fast: 9000\nmodel name\t: Other\n")
    assert cpu_model(tmp_path / "cpuinfo") == "Fast: 9000"
    assert cpu_model(tmp_path / "nothing")


def test_the_own_address_towards_the_loopback_is_the_loopback_s() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"


def test_without_a_way_the_address_is_an_interface_s_and_without_any_the_loopback_s(
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
