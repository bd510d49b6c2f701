"""The machine that this process runs on: versions, processor, and the address at which others reach it."""

from __future__ import annotations

import importlib.util
import platform
import socket
from pathlib import Path

import psutil

from evener.version import VERSION

_LOOPBACK = "127.0.0.1"
_PACKAGES = ("evener", "torch", "torchvision", "numpy", "msgspec", "safetensors", "matplotlib", "tensorboard")
_ANYWHERE = "192.0.2.1"  # an address that documentation may use, so nobody's: only the way there is asked for


def environment() -> dict[str, str]:
    """Versions and facts that a reader of a profile or record needs to compare it with another; without PyTorch's."""
    return {
        "evener": VERSION,
        "python": platform.python_version(),
        "torch": version_of("torch") or "not installed",
        "os": platform.platform(),
        "host": socket.gethostname(),
        "cpu": cpu_model(),
    }


def package_versions() -> dict[str, str]:
    """`evener version`: of Python and of every package that matters, or the words `not installed`."""
    return {"python": platform.python_version(), **{name: version_of(name) or "not installed" for name in _PACKAGES}}


def version_of(package: str) -> str:
    """The version of an installed package, which is not imported; empty for another."""
    if importlib.util.find_spec(package) is None:
        return ""
    if package == "evener":
        return VERSION
    from importlib.metadata import version  # a MB that a thin node does not need

    return version(package)


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The maker's name of the processor, or its architecture."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine() or "unknown"


def own_address(towards: str = _ANYWHERE) -> str:
    """The address of the interface through which this machine reaches host `towards`; nothing is sent.

    Where there is no way, that of the first interface which is not the loopback's; on a machine without a network, the
    loopback's.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
            return str(probe.getsockname()[0])
        except OSError:
            pass
    addresses = (entry for entries in psutil.net_if_addrs().values() for entry in entries)
    found = (entry.address for entry in addresses if entry.family == socket.AF_INET)
    return next((address for address in found if not address.startswith("127.")), _LOOPBACK)
