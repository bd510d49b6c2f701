"""What a machine of the star plane is: its versions, its address for others, the device that computes."""

from __future__ import annotations

import importlib.util
import platform
import socket

import psutil

from evener import __version__
from evener.errors import InvalidValue, require
from evener.ps.reception import Versions
from evener.wire.address import Address

_LOOPBACK = "127.0.0.1"


def versions() -> Versions:
    """What runs here; PyTorch is not imported."""
    return Versions(__version__, platform.python_version(), _version("torch"))


def facts() -> dict[str, str]:
    """Versions and host, for records."""
    here = versions()
    return {
        "evener": here.evener,
        "python": here.python,
        "torch": here.torch or "not installed",
        "os": platform.platform(),
        "host": socket.gethostname(),
    }


def reachable_address(bound: Address) -> Address:
    """The address under which other machines find what listens at `bound`."""
    if bound.path or bound.host not in ("", "0.0.0.0", "::"):
        return bound
    return Address(_own_address(), bound.port)


def choose_device(device: str | None) -> str:
    """The device that the user named, or the best that is here.

    Raises:
        InvalidValue: there is no such device.
    """
    if device == "cpu":
        return "cpu"
    if importlib.util.find_spec("torch") is None:
        if device is None:
            return "cpu"
        raise InvalidValue("--device", device, "cpu, for PyTorch is not installed")
    import torch

    known = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if device is None:
        return known[1] if len(known) > 1 else "cpu"
    require(device in known, "--device", device, f"one of {', '.join(known)}")
    return device


def _own_address() -> str:
    """The address with which this machine speaks to others; the loopback's if it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # sends nothing: asks the system for the way to anywhere
            return str(sock.getsockname()[0])
        except OSError:
            pass
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return address.address
    return _LOOPBACK


def _version(package: str) -> str:
    """Of an installed package; empty for another."""
    if importlib.util.find_spec(package) is None:
        return ""
    from importlib.metadata import version  # a MB that a thin node does not need

    return version(package)
