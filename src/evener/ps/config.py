"""What a master is given, which all its parts share: its folder, its clock, what runs there, and whom to tell."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import NamedTuple

from evener import __version__
from evener.host import version_of
from evener.ps.state_dir import StateDir
from evener.wire.identity import Identity


class Versions(NamedTuple):
    """What runs on a machine; `torch` is empty where it is not installed."""

    evener: str
    python: str
    torch: str


def versions_here() -> Versions:
    """What runs on this machine; PyTorch is not imported."""
    return Versions(__version__, platform.python_version(), version_of("torch"))


class MasterConfig(NamedTuple):
    """What a master is given.

    Attributes:
        home: its folder.
        identity: who it is.
        versions: of what runs here.
        environment: the same and more, for records.
        patience: seconds of silence after which a node is given up.
        notify: tells its user.
        clock: seconds, never going back.
    """

    home: StateDir
    identity: Identity
    versions: Versions
    environment: dict[str, str]
    patience: float
    notify: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
