"""From the command line's words to the nodes of a run on this machine."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from evener.errors import InvalidValue
from evener.launch.nodes import LocalNode, local_nodes, parse_local_nodes

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMG]?i?B?)\s*$", re.IGNORECASE)


def choose_nodes(speeds: str | None, devices: str, memory: str | None) -> list[LocalNode]:
    """The nodes of a run on this machine.

    Args:
        speeds: of local nodes, `1.0,0.5,0.25`; None for one node a device.
        devices: `all`, `cpu`, or names such as `cuda:0,cuda:1`.
        memory: `4GB`, or one size a node; None for what the devices have.

    Raises:
        InvalidValue: a speed, a device or a size is wrong.
    """
    sizes = [parse_bytes(text) for text in memory.split(",")] if memory else []
    names = _devices(devices)
    count = len(speeds.split(",")) if speeds is not None else len(names)
    granted = sizes * count if len(sizes) == 1 else sizes
    return local_nodes(names, granted) if speeds is None else parse_local_nodes(speeds, granted)


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `512MB` or `4GiB`. Raises InvalidValue."""
    match = _SIZE.match(text)
    unit = match[2].upper() if match else ""
    if match is None or unit not in _UNITS or float(match[1]) <= 0:
        raise InvalidValue("--memory", text, "a positive size such as 512MB or 4GB")
    return int(float(match[1]) * _UNITS[unit])


def _devices(text: str) -> Sequence[str]:
    """Names of devices. Raises InvalidValue for one that this machine does not have."""
    here = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if text == "all":
        return here or ["cpu"]
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = ["cpu", *here]
    for name in names or [text]:
        if name not in known:
            raise InvalidValue("--devices", name, f"all, or some of {', '.join(known)}")
    return names
