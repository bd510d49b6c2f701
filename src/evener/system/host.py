"""The machine of this process: versions, CPU, and the address at which other machines reach it."""

from __future__ import annotations

import importlib.util
import os
import platform
import socket
from pathlib import Path

import psutil

from evener.records.errors import InvalidInput
from evener.records.version import VERSION

_LOOPBACK = "127.0.0.1"
_PACKAGES = ("evener", "torch", "torchvision", "numpy", "msgspec", "safetensors", "matplotlib", "tensorboard")
_ANYWHERE = "192.0.2.1"  # reserved for documentation: only the route to it is looked up


def environment() -> dict[str, str]:
    """Return versions and facts by which a reader compares a profile or record with another; without PyTorch's."""
    return {
        "evener": VERSION,
        "python": platform.python_version(),
        "torch": version_of("torch") or "not installed",
        "os": platform.platform(),
        "host": socket.gethostname(),
        "cpu": cpu_model(),
    }


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of all relevant packages, or `not installed`, for `evener version`."""
    return {"python": platform.python_version(), **{name: version_of(name) or "not installed" for name in _PACKAGES}}


def has_posix() -> bool:
    """Return whether this system has the processes and sockets of POSIX: Linux and macOS have, Windows has not."""
    return hasattr(os, "fork")


def require_posix(what: str) -> None:
    """Raise InvalidInput on a system that cannot do `what`, and say what it can do."""
    if not has_posix():
        raise InvalidInput(
            f"{what} needs Linux or macOS. On this system Evener trains on one device, and `evener join` makes it a "
            "node of a master on another one; inside WSL2 everything works"
        )


def version_of(package: str) -> str:
    """Return the version of an installed package, without importing it; empty if it is not installed."""
    if importlib.util.find_spec(package) is None:
        return ""
    if package == "evener":
        return VERSION
    from importlib.metadata import version  # it takes 1 MB, which a thin node saves

    return version(package)


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the maker's name of the CPU, or its architecture."""
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine() or "unknown"


def own_address(towards: str = _ANYWHERE) -> str:
    """Return the address of the interface through which this machine reaches the host `towards`, without sending
    anything.

    Without a route, return that of the first interface other than the loopback; without a network, the loopback's.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
            return str(probe.getsockname()[0])
        except OSError:
            pass
    addresses = (entry for entries in psutil.net_if_addrs().values() for entry in entries)
    ipv4 = (entry.address for entry in addresses if entry.family == socket.AF_INET)
    return next((address for address in ipv4 if not address.startswith("127.")), _LOOPBACK)
