"""What a node is and has."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from evener import __version__
from evener.host import version_of
from evener.profile import DeviceProfile
from evener.ps.admission import Versions
from evener.ps.engine import Build


class NodeConfig(NamedTuple):
    """What a node is and has.

    Attributes:
        name: of the node.
        device: that computes.
        speed: 1, or the fraction to which it is slowed down.
        data: folder of its own data; None if it has none.
        cache: folder of what is sent to it.
        versions: of what runs on it.
        measure: the profile of its device; takes a few seconds.
        build: makes engines.
    """

    name: str
    device: str
    speed: float
    data: Path | None
    cache: Path
    versions: Versions
    measure: Callable[[], DeviceProfile]
    build: Build


def versions_here() -> Versions:
    """What runs on this machine; PyTorch is not imported."""
    return Versions(__version__, platform.python_version(), version_of("torch"))
