"""What a machine of the star plane is: its versions, its address for others, the device that computes."""

from __future__ import annotations

import importlib.util
import platform

from evener import __version__
from evener.errors import InvalidValue, require
from evener.host import own_address, version_of
from evener.ps.admission import Versions
from evener.wire.identity import Address


def versions() -> Versions:
    """What runs here; PyTorch is not imported."""
    return Versions(__version__, platform.python_version(), version_of("torch"))


def reachable_address(bound: Address) -> Address:
    """The address under which other machines find what listens at `bound`."""
    if bound.path or bound.host not in ("", "0.0.0.0", "::"):
        return bound
    return Address(own_address(), bound.port)


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
